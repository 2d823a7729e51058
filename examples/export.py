"""A trained model as a directory of transformers, compared with ours there, and continued by both.

    python examples/export.py [FOLDER OF A RUN [FOLDER OF THE MODEL]]

Without a run, examples/train.py makes one first.
"""

import sys
from pathlib import Path

import torch
import transformers
from train import train

import dolmen

PROMPT = "The layout never changes"


def main(run: str = "runs/example", to: str = "runs/example-model") -> tuple[str, str]:
    """The continuation of PROMPT by dolmen and by transformers, both greedy."""
    if not Path(run, "config.yaml").exists():
        train(out=run)
    dolmen.export(run, to=to)
    report = dolmen.verify(to)  # logits, loss, gradients and text of both, in float32
    assert report.ok, report.rows

    ours = dolmen.load(to, dtype=torch.float32).generate(PROMPT, max_new_tokens=16)

    model = transformers.AutoModelForCausalLM.from_pretrained(to, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(to)
    tokens = model.generate(**tokenizer(PROMPT, return_tensors="pt"), max_new_tokens=16)
    return str(ours), tokenizer.decode(tokens[0], skip_special_tokens=True)


if __name__ == "__main__":
    for who, text in zip(("dolmen", "transformers"), main(*sys.argv[1:]), strict=True):
        print(f"{who}: {text}")
