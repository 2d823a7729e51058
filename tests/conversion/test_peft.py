"""Adapters against PEFT itself: logits and gradients of A and B in float64, and folders both ways.
What neither has of the other is refused.
"""

import copy
import json
import shutil
from fnmatch import fnmatch

import huggingface_hub
import peft
import pytest
import tinyrun
import torch
import transformers
import wide
from peft.tuners.tuners_utils import check_target_module_exists
from safetensors.torch import save_file
from tiny_models import Tiny, build, load
from tinyrun import dolmen

from dolmen.conversion import peft as folders
from dolmen.conversion import peft_config
from dolmen.conversion.source import load_weights, open_adapters, open_source
from dolmen.core.mesh import SINGLE
from dolmen.core.messages import BadInput
from dolmen.files import safetensors
from dolmen.files.gate import Refused
from dolmen.model import head
from dolmen.model.layout import Layout
from dolmen.model.training import Training
from dolmen.serving import processes

# PEFT asks `transformers` by a name that it will drop
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
material, one_thread = tinyrun.material, tinyrun.one_thread
SIZES = dict(
    vocab_size=71,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    bos_token_id=0,
    eos_token_id=0,
)
BASES = {
    "llama": transformers.LlamaConfig(**SIZES),
    "qwen3_moe": transformers.Qwen3MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24
    ),
    "gpt2": transformers.GPT2Config(
        vocab_size=71, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    ),
}
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES = [
    ("llama", dict(r=4, lora_alpha=6, target_modules=ALL)),
    ("llama", dict(r=9, lora_alpha=2, use_rslora=True, target_modules=["v_proj", "down_proj"])),
    ("qwen3_moe", dict(r=3, lora_alpha=8, target_modules=["q_proj", "v_proj", "o_proj"])),
    ("llama", dict(r=4, lora_alpha=6, use_dora=True, target_modules=ALL)),
    ("gpt2", dict(r=4, lora_alpha=6, target_modules=["c_fc"], fan_in_fan_out=True)),
    ("llama", dict(r=4, lora_alpha=6, target_modules=r".*\.1\.self_attn\.[qv]_proj")),
    ("llama", dict(r=4, lora_alpha=6, target_modules="all-linear", exclude_modules=r".*\.0\..*")),
]


def theirs(folder, name: str, requested: dict):
    """A model of `transformers` that PEFT has given adapters, felt, and both as folders."""
    torch.manual_seed(0)
    base = wide.double(copy.deepcopy(BASES[name]))
    with torch.no_grad():
        for p in base.parameters():
            p.normal_(0.0, 0.1)
    base.save_pretrained(folder / "base")
    model = peft.get_peft_model(base, peft.LoraConfig(**requested, task_type="CAUSAL_LM")).eval()
    with torch.no_grad():
        for n, p in model.named_parameters():
            if "lora_B" in n:
                p.normal_(0.0, 0.3)
            if "lora_magnitude" in n:
                p.mul_(torch.rand(p.shape) + 0.5)
    model.peft_config["default"].base_model_name_or_path = "../base"
    # of the head too the adapter alone
    model.save_pretrained(folder / "adapter", save_embedding_layers=False)
    return model


@pytest.mark.parametrize("name, options", CASES)
def test_we_compute_what_peft_does(name, options, tmp_path):
    model = theirs(tmp_path, name, options)
    source = open_source(tmp_path / "base")
    read = folders.read(tmp_path / "adapter", source.model)
    spec = source.model.spec
    ours = build(Tiny(spec, Training(adapter=read.form)), SINGLE, dtype=torch.float64)

    def stream(write):
        load_weights(source, write)
        for weight in read.form.targets:
            for one, value in read.tensors(weight).items():
                write(one, value)

    load(ours, stream)
    tokens = torch.randint(71, (2, 9), generator=torch.Generator().manual_seed(2))
    with wide.Wide():
        logits = model(tokens).logits
    got = ours(tokens, head.compute_logits)
    assert (got.view_as(logits) - logits).abs().max() <= 1e-12 * logits.abs().max()
    with model.disable_adapter(), wide.Wide():  # and adapters are felt
        assert (model(tokens).logits - logits).abs().max() > 1e-2 * logits.abs().max()
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    labels = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
    total = ours(tokens, head.cross_entropy_function(labels))
    (total * (loss.detach() / total.detach())).backward()
    modules = {ours_: stored for stored, ours_ in folders._modules(source.model).items()}
    grads = dict(model.named_parameters())
    for weight in read.form.targets:
        for kind, one in zip(folders.KINDS, read.tensors(weight), strict=False):
            kind = kind.removesuffix(".weight")
            want = grads[f"{folders.PREFIX}{modules[weight]}.{kind}.default.weight"].grad
            mine = ours.get_parameter(one).grad
            assert (mine - want).abs().max() <= 1e-10 * want.abs().max(), one


HEAD = ("llama", dict(r=4, lora_alpha=6, target_modules=["q_proj", "lm_head"]))


@pytest.mark.parametrize("case", [CASES[0], CASES[3], HEAD])
def test_a_folder_of_peft_is_a_source(case, tmp_path):
    """Of the model that it names, the weights that PEFT merges, in the dtype they were in."""
    model = theirs(tmp_path, *case)
    source = open_source(tmp_path / "adapter")
    merged = model.merge_and_unload().state_dict()
    for stored, ours in folders._modules(source.model).items():
        want = merged[f"{stored}.weight"]
        assert source.read(ours).dtype == want.dtype == torch.float64
        torch.testing.assert_close(source.read(ours), want, rtol=1e-13, atol=1e-13)
    assert dict(source.stream()).keys() == source.specs.keys()


def test_what_could_not_be_multiplied_beside_a_base_is_refused(tmp_path):
    """The head, which nothing would have applied, and DoRA beside eight bits: before any model is
    loaded.
    """
    for name, case in (("head", HEAD), ("dora", CASES[3])):
        theirs(tmp_path / name, *case)

    def check(name, weights):
        folder = tmp_path / name
        fr = f"fr={folder / 'adapter'}"
        processes.resolve(
            "generate", [str(folder / "base")], Layout(), "cpu", weights=weights, adapters=[fr]
        )

    with pytest.raises(BadInput, match=r"adapter fr: it adapts head.weight, .*dolmen export"):
        check("head", "stated")
    check("dora", "stated")
    with pytest.raises(BadInput, match="adapter fr: it is DoRA, .* leave out --weights int8"):
        check("dora", "int8")


def test_adapters_may_be_a_hub_id(tmp_path, monkeypatch):
    """As a source, and over a base: their two files are among those that are fetched."""
    theirs(tmp_path, *CASES[0])
    change(tmp_path, base_model_name_or_path="org/base")
    (tmp_path / "adapter/optimizer.pt").write_text("large")
    hub = {"org/base": tmp_path / "base", "org/fr": tmp_path / "adapter"}

    def snapshot_download(name, revision, allow_patterns):
        folder = tmp_path / "cache" / name
        folder.mkdir(parents=True, exist_ok=True)
        for file in hub[name].iterdir():
            if any(fnmatch(file.name, pattern) for pattern in allow_patterns):
                shutil.copy(file, folder)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    source = open_source("org/fr")
    fetched = {file.name for file in (tmp_path / "cache/org/fr").iterdir()}
    assert fetched == {folders.CONFIG, folders.WEIGHTS}
    there = folders.read(tmp_path / "adapter", source.model)
    over = open_adapters("org/fr", open_source("org/base"))
    assert over.form == there.form
    for weight in there.form.targets:
        merged = there.merge(weight, open_source(tmp_path / "base").read(weight))
        assert torch.equal(source.read(weight), merged)


def test_peft_reads_what_a_run_has_learned(material, tmp_path):
    """The adapters of a run, exported, beside the model that the run began with."""
    arguments = ["train", "pretrain", "--init", material.model, "--data.path", material.docs]
    arguments += ["--data.cache", material.folder / "cache", "--out", tmp_path / "run"]
    arguments += ["--train.steps", 2, "--train.sequence-length", 16, "--train.global-batch-size", 4]
    arguments += ["--optimizer.lr", 1e-2, "--adapter.rank", 2, "--adapter.scaling", "root"]
    arguments += ["--adapter.kind", "dora"]
    result = dolmen(*arguments)
    assert result.code == 0, result.err
    template = "{% for m in messages %}{{ m['content'] }}!{% endfor %}"
    (tmp_path / "run/tokenizer/chat_template.jinja").write_text(template)
    result = dolmen("export", tmp_path / "run", "--to", tmp_path / "peft", "--adapters")
    assert result.code == 0, result.err
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "peft")
    chat = [{"role": "user", "content": "abc"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "abc!"
    assert tokenizer("abc") == transformers.AutoTokenizer.from_pretrained(material.model)("abc")
    assert open_source(tmp_path / "peft").tokenizer == tmp_path / "peft"
    assert f"trained on {material.model}\n" in result.out
    said = json.loads((tmp_path / "peft" / folders.CONFIG).read_text())
    assert (
        said["use_rslora"]
        and said["use_dora"]
        and said["r"] == 2
        and len(said["target_modules"]) == 7
    )
    base = transformers.AutoModelForCausalLM.from_pretrained(material.model, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "peft").eval()
    tokens = torch.randint(300, (1, 12), generator=torch.Generator().manual_seed(2))
    want = model(tokens).logits
    with model.disable_adapter():
        assert (model(tokens).logits - want).abs().max() > 1e-3
    source = open_source(tmp_path / "run")
    ours = build(Tiny(source.spec), SINGLE)
    load(ours, lambda write: load_weights(source, write))
    with torch.no_grad():
        got = ours(tokens, head.compute_logits).view_as(want)
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()
    again = dolmen("export", tmp_path / "run", "--to", tmp_path / "peft", "--adapters")
    assert again.code == 2 and "is not empty" in again.words
    with pytest.MonkeyPatch.context() as patch:  # broken off before it is whole
        patch.setattr(folders, "_config", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            folders.write(source, tmp_path / "broken", torch.float32)
    assert not (tmp_path / "broken").exists()
    none = dolmen("export", material.model, "--to", tmp_path / "none", "--adapters")
    assert none.code == 2 and "has no adapters" in none.words


@pytest.mark.slow
def test_an_export_says_that_the_base_was_rounded(material, tmp_path):
    """PEFT puts the adapters beside the base as it is, and they were trained beside its int8."""
    arguments = ["train", "pretrain", "--init", material.model, "--data.path", material.docs]
    arguments += ["--data.cache", material.folder / "cache", "--out", tmp_path / "run"]
    arguments += ["--train.steps", 1, "--train.sequence-length", 16, "--train.global-batch-size", 4]
    result = dolmen(*arguments, "--adapter.rank", 2, "--adapter.frozen", "int8")
    assert result.code == 0, result.err
    with pytest.warns(UserWarning, match=r"on .*/model rounded to int8 \(--adapter.frozen\)"):
        result = dolmen("export", tmp_path / "run", "--to", tmp_path / "peft", "--adapters")
    assert result.code == 0


def change(folder, **fields):
    file = folder / "adapter" / folders.CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


REACHES = [
    dict(target_modules=["q_proj"]),
    dict(target_modules=["proj", "self_attn.q_proj", "model.layers.1.mlp.gate"]),
    dict(target_modules=ALL, exclude_modules=["layers.0.self_attn.q_proj", "lm_head"]),
    dict(target_modules=["q_proj"], layers_to_transform=1),
    dict(target_modules=["q_proj"], layers_to_transform=0),
    dict(target_modules=["q_proj"], layers_to_transform=[]),
    dict(target_modules=["model.layers.0.self_attn.q_proj", "q_proj"], layers_to_transform=[1]),
    dict(target_modules=["up_proj", "lm_head", "c_attn"], layers_to_transform=[1, 12]),
    dict(target_modules=["up_proj"], layers_to_transform=[1], layers_pattern="experts"),
    dict(target_modules=["up_proj", "c_attn"], layers_to_transform=[1], layers_pattern=["h", "x"]),
    dict(target_modules=["c_attn"], layers_to_transform=[0], layers_pattern=["h", "layers"]),
    dict(target_modules=r"model\.layers\.(0|12)\..*_proj|lm_head"),
    dict(target_modules=r"model\.layers\.1|q_proj"),  # all of a name, not its beginning or end
    dict(target_modules=r".*_proj", exclude_modules=r".*\.experts\..*|q_proj"),
    dict(target_modules=["q_proj", "c_attn"], exclude_modules="(?i).*SELF_ATTN.*"),
]


@pytest.mark.parametrize("options", REACHES)
def test_the_modules_that_adapters_are_beside_are_those_of_peft(options, tmp_path):
    modules = [f"model.layers.{i}.self_attn.q_proj" for i in (0, 1, 12)]
    modules += [f"model.layers.{i}.mlp.experts.1.up_proj" for i in (0, 1)]
    modules += [
        "model.layers.1.mlp.gate",
        "lm_head",
        "q_proj",
        "h.0.c_attn",
        "transformer.h.0.c_attn",
    ]
    config, reach = peft.LoraConfig(**options), peft_config.Reach(tmp_path, options)
    found = {module: check_target_module_exists(config, module) for module in modules}
    reach.check([module for module in modules if found[module]])
    for module in modules:
        if not found[module]:
            with pytest.raises(Refused, match=module):
                reach.check([module])


def test_what_is_said_of_modules_and_not_understood_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(peft_config, "SECONDS", 1)
    for requested, said in (
        (dict(target_modules=None), "target_modules is null"),
        (
            dict(target_modules="(q_proj"),
            r"target_modules is not a regular .*unterminated.*\(q_proj",
        ),
        (dict(target_modules="(" * 4000), "target_modules is not a regular"),
        (dict(target_modules=r"([a-z0-9_.]+)+!"), "target_modules is .* takes over 1 s, or 1 GiB"),
        (dict(target_modules=ALL, exclude_modules="(a"), "exclude_modules is not a regular"),
        (
            dict(target_modules=".*", layers_to_transform=[0]),
            "with a target_modules that is a string",
        ),
        (
            dict(target_modules=ALL, layers_to_transform=[0], layers_pattern="(a+)+"),
            r"layers_pattern is \(a",
        ),
    ):
        with pytest.raises(Refused, match=said):
            peft_config.Reach(tmp_path, requested).check(["model.layers.0.self_attn.q_proj"])


def test_all_linear_leaves_the_head_out(tmp_path):
    theirs(tmp_path, *HEAD)
    model = open_source(tmp_path / "base").model
    assert "head.weight" in folders.read(tmp_path / "adapter", model).form.targets
    change(tmp_path, target_modules="all-linear")
    with pytest.raises(Refused, match="target_modules does not match lm_head"):
        folders.read(tmp_path / "adapter", model)


def test_what_is_no_lora_of_the_model_is_refused(tmp_path):
    theirs(tmp_path / "first", *CASES[0])
    model = open_source(tmp_path / "first/base").model
    for number, (fields, said) in enumerate(
        [
            (dict(peft_type="IA3"), "has peft_type IA3"),
            (dict(use_dora=True), "lora_magnitude is missing"),
            (dict(modules_to_save=["lm_head"]), "has modules_to_save"),
            (dict(rank_pattern={"q_proj": 2}), "has rank_pattern"),
            (dict(bias="all"), "has bias all"),
            (dict(r=5), "rank 5 with a weight"),
            (dict(r=0), "r is 0"),
            (dict(lora_alpha="x"), "lora_alpha"),
            (dict(kasa_config={}), "has kasa_config"),
            (dict(velora_config={"rank": 1}), "has velora_config"),
            (dict(monteclora_config={}), "has monteclora_config"),
            (dict(use_bdlora={"nblocks": 2}), "has use_bdlora"),
            (dict(of_tomorrow_config={"a": 1}), "has of_tomorrow_config"),
            (dict(use_of_tomorrow=True), "has use_of_tomorrow"),
            (dict(target_modules=5), "target_modules is 5"),
            (dict(init_lora_weights={"a": 1}), "init_lora_weights is"),
            (dict(lora_dropout="x"), "lora_dropout is 'x'"),
            (dict(target_modules=["v_proj"]), r"target_modules does not match .*: add .*_proj to"),
            (
                dict(layers_to_transform=[1]),
                r"layers_to_transform does .* model\.layers\.0\..* add 0",
            ),
            (dict(exclude_modules=["o_proj"]), r"exclude_modules matches .*o_proj"),
        ]
    ):
        made = tmp_path / str(number)
        shutil.copytree(tmp_path / "first", made)
        change(made, **fields)
        with pytest.raises(Refused, match=said):
            folders.read(made / "adapter", model)
    for number, fields in enumerate(
        (
            dict(target_modules="all-linear", kasa_config=None, of_tomorrow_config={}),
            dict(
                target_modules=r".*[a-z]_proj",
                loftq_config={"loftq_bits": 4},
                use_of_tomorrow=False,
            ),
            dict(layers_to_transform=[0, 1], exclude_modules=["lm_head"], layers_pattern="layers"),
            dict(init_lora_weights="gaussian", lora_dropout=0.1, exclude_modules=""),
        )
    ):
        made = tmp_path / f"good{number}"
        shutil.copytree(tmp_path / "first", made)
        change(made, **fields)
        assert len(folders.read(made / "adapter", model).form.targets) == 2 * len(ALL)
    file = tmp_path / "first/adapter" / folders.WEIGHTS
    names = [n for n in safetensors.read_header(file) if "layers.1.self_attn.q_proj.lora_B" in n]
    assert len(names) == 1
    file.write_bytes(file.read_bytes().replace(b"layers.1.self_attn.q", b"layers.1.self_attn.x"))
    with pytest.raises(Refused, match="belongs to no layer of llama"):
        folders.read(tmp_path / "first/adapter", model)
    shutil.copytree(tmp_path / "0", tmp_path / "norm")
    change(tmp_path / "norm", peft_type="LORA")
    for module, rows in (("model.norm", 32), ("model.embed_tokens", 71)):
        parts = {"lora_A": torch.zeros(4, 32), "lora_B": torch.zeros(rows, 4)}
        parts = {f"{folders.PREFIX}{module}.{kind}.weight": one for kind, one in parts.items()}
        save_file(parts, tmp_path / "norm/adapter" / folders.WEIGHTS)
        said = (
            rf"for {module} of shape \[{rows}.*\], which is not a linear layer: .*\.q_proj\.lora_A"
        )
        with pytest.raises(Refused, match=said):
            folders.read(tmp_path / "norm/adapter", model)
    change(tmp_path / "first", base_model_name_or_path=None)
    with pytest.raises(Refused, match="has no base_model_name_or_path"):
        open_source(tmp_path / "first/adapter")
