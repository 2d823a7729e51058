"""What stands in for a model, and for data of one's own, in the roads beside this: a tiny random
model of a family, made on the spot, and things that are good or bad. Chats say either as often, and
pairs prefer the good.
"""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128}
LLAMA |= {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128}
BLOOM = {"model_type": "bloom", "hidden_size": 64, "n_layer": 2, "n_head": 4}
GPTJ = {"model_type": "gptj", "n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8}
GPTJ |= {"n_positions": 128}

THINGS = "tea soup bread rain snow wind sea hill road song book hat coat lamp door clock".split()
ASKED, SAID = "How is the {}?", ("The {} is good.", "The {} is bad.")
TEXTS = [text.format(thing) for thing in THINGS for text in (ASKED, *SAID)]
TEXTS += ["### Instruction:\n### Response:\n"] * 9  # what the template alpaca writes
END = "<|endoftext|>"


def start(model: dict | str, folder: Path) -> str:
    """A random model of this config.json, in `folder`; a name stays as it is."""
    if isinstance(model, str):
        return model
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    known = {"special_tokens": [END], "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    made.train_from_iterator(TEXTS, trainers.BpeTrainer(show_progress=False, **known))
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END).save_pretrained(folder)
    torch.manual_seed(0)
    ids = {"vocab_size": made.get_vocab_size(), "bos_token_id": 0, "eos_token_id": 0}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**model, **ids)).save_pretrained(folder)
    return str(folder)


def write(folder: Path, name: str) -> Path:
    """A file of `chats`, `pairs` or `prompts`, with the fields that docs/how-to/tuning.md names."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for thing in THINGS:
        asked, (good, bad) = ASKED.format(thing), (text.format(thing) for text in SAID)
        user = {"role": "user", "content": asked}
        both = [[user, {"role": "assistant", "content": one}] for one in (good, bad)]
        rows += {
            "chats": [{"messages": chat} for chat in both],
            "pairs": [{"prompt": asked, "chosen": good, "rejected": bad}],
            "prompts": [{"messages": [user]}],
        }[name]
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
