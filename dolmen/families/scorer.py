"""A config.json that ends in one number in the place of logits, a reward or a value: it names the
class of transformers that does (...ForSequenceClassification), and one label.
"""

from collections.abc import Mapping
from typing import Any

from dolmen.core.messages import shown
from dolmen.families.family import Family

ENDING = "ForSequenceClassification"
LABELS = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
"""As transformers writes one."""
TRANSFORMERS = 2  # labels, where a config.json states none


def scores(config: Mapping[str, Any], family: Family) -> bool:
    """Whether a config.json is of a model that ends in one number. Raises ValueError for a
    classifier of several labels, and of a family that has another or none.
    """
    named = config.get("architectures") or []
    if not (isinstance(named, list) and any(str(name).endswith(ENDING) for name in named)):
        return False
    check(family)
    if named != [family.scorer]:
        raise ValueError(
            f"architectures is {shown(named)}: {family.name} ends in one number as "
            f"{family.scorer} alone"
        )
    labels = config.get("id2label")
    count = config.get("num_labels", TRANSFORMERS) if labels is None else len(labels)
    if count != 1:
        raise ValueError(
            f"num_labels is {shown(count)}: dolmen reads classifiers of one label, which are "
            "reward models"
        )
    return True


def check(family: Family) -> None:
    """Raises ValueError where transformers has no such class of the family."""
    if family.scorer is None:
        raise ValueError(
            f"transformers has no {family.name} that ends in one number and has no bias there: "
            "choose a model of another family, such as llama, qwen2 or gpt2"
        )


def scored(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The config.json of the same model with one number in the place of logits. Raises as
    `check`.
    """
    check(family)
    return {
        **{name: value for name, value in config.items() if name != "num_labels"},
        "architectures": [family.scorer],
        **LABELS,
    }


def unscored(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The inverse: the same model with logits."""
    kept = {name: value for name, value in config.items() if name not in LABELS}
    return {**kept, "architectures": [family.architecture]}
