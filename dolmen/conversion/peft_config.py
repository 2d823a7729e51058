"""What an adapter_config.json of PEFT's says, where that is LoRA or DoRA beside matrices, and which
modules it is of. What PEFT would read otherwise than as B A beside a matrix is refused; so are
tensors that it would leave out, as the adapter of a module that `target_modules` does not name.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dolmen.files import gate

OTHER_BASES = ("pissa", "olora", "corda", "loftq")
"""Ways to begin after which the adapter is of another base than the one it names."""
OTHERWISE = (
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "lora_bias",
    "target_parameters",
    "trainable_token_indices",
    "use_qalora",
    "alora_invocation_tokens",
    "megatron_config",
    "layer_replication",
)
"""What makes adapters something else than B A beside a matrix, where it is not empty."""
FORMS = ("arrow_config", "kasa_config", "monteclora_config", "use_bdlora", "velora_config")
"""The same, and {} too: that is such a form with its defaults."""
HARMLESS = (
    "corda_config",
    "eva_config",
    "loftq_config",
    "lora_ga_config",
    "runtime_config",
    "use_dora",
    "use_rslora",
)
"""What is read, and how A and B were begun, of which the base as it is knows nothing."""


def check(file: Path, said: Mapping[str, Any]) -> None:
    """Raises Refused for an adapter that is no LoRA or DoRA as it is read here."""
    if said["peft_type"] != "LORA":
        raise gate.refuse(file, f"is of {said['peft_type']}: dolmen reads LORA")
    if said.get("bias", "none") != "none":
        raise gate.refuse(file, f"trains biases ({said['bias']}): dolmen reads bias none")
    for name, value in said.items():
        unknown = name.endswith("_config") or name.startswith("use_")
        other = name in OTHERWISE or (unknown and name not in (*HARMLESS, *FORMS))
        if (other and value) or (name in FORMS and value is not None and value is not False):
            raise gate.refuse(
                file,
                f"has {name}, which dolmen does not read: train without it, or merge the adapter "
                "with PEFT and give the merged model",
            )
    begun = str(said.get("init_lora_weights")).lower()
    if begun.startswith(OTHER_BASES):
        raise gate.refuse(
            file,
            f"has init_lora_weights {begun}, by which PEFT changes the base as it loads: merge it "
            "there, or save it as plain LoRA",
        )


@dataclass(frozen=True)
class Reach:
    """Beside which modules PEFT puts an adapter. A `target_modules` that is text ("all-linear" or a
    regular expression, which is not run) or null may be any.
    """

    file: Path
    said: Mapping[str, Any]

    def check(self, module: str) -> None:
        """Raises Refused where a module that has an adapter is not among them."""
        if self._excluded is not None and _named(module, self._excluded):
            raise gate.refuse(
                self.file,
                f"exclude_modules names {module}, which has an adapter that PEFT leaves out: take "
                "it from exclude_modules, or its tensors from the other file",
            )
        if self._targets is not None and not _named(module, self._targets):
            raise gate.refuse(
                self.file,
                f"target_modules does not name {module}, which has an adapter that PEFT leaves "
                f"out: add {module.rpartition('.')[2]} to target_modules, or take its tensors from "
                "the other file",
            )
        if self._layers and module not in (self._targets or ()):  # a whole name is of any layer
            layer = self._layer(module)
            if layer not in self._layers:
                raise gate.refuse(
                    self.file,
                    f"layers_to_transform does not have the layer of {module}, which has an "
                    f"adapter that PEFT leaves out: "
                    f"{'take' if layer is None else f'add {layer} to it, or take'} "
                    "its tensors from the other file",
                )

    @cached_property
    def _targets(self) -> frozenset[str] | None:
        asked = self.said.get("target_modules")
        return frozenset(asked) if isinstance(asked, list) else None

    @cached_property
    def _excluded(self) -> frozenset[str] | None:
        asked = self.said.get("exclude_modules")
        if isinstance(asked, str) and asked:
            raise gate.refuse(
                self.file,
                "exclude_modules is a regular expression, which dolmen does not run: write there "
                "the list of the modules that it excludes, or null",
            )
        return frozenset(asked) if asked else None

    @cached_property
    def _layers(self) -> frozenset[int]:
        """Empty: all."""
        asked = self.said.get("layers_to_transform")
        found = frozenset([asked] if isinstance(asked, int) else asked or ())
        if found and isinstance(self.said.get("target_modules"), str):
            raise gate.refuse(
                self.file,
                "has layers_to_transform beside a target_modules that is text, which PEFT refuses: "
                "write there the list of modules",
            )
        return found

    @cached_property
    def _lists(self) -> tuple[str, ...]:
        """Names of the lists whose layers are counted; empty: any."""
        asked = self.said.get("layers_pattern") or ()
        found = (asked,) if isinstance(asked, str) else tuple(asked)
        for name in found:
            if re.fullmatch(r"\w+", name) is None:
                raise gate.refuse(
                    self.file,
                    f"layers_pattern is {name}: dolmen reads the name of a list of layers there, "
                    "such as layers",
                )
        return found

    def _layer(self, module: str) -> int | None:
        """As PEFT counts: behind the first of the lists that the module is in."""
        parts = module.split(".")
        numbered = [i for i in range(1, len(parts) - 1) if parts[i].isdecimal()]
        if not self._lists:  # PEFT has one name at least before that of the list
            return next((int(parts[i]) for i in numbered if i > 1), None)
        found = (int(parts[i]) for name in self._lists for i in numbered if parts[i - 1] == name)
        return next(found, None)


def _named(module: str, names: frozenset[str]) -> bool:
    """Whether one of the names is the module's, or ends it behind a dot."""
    parts = module.split(".")
    return any(".".join(parts[i:]) in names for i in range(len(parts)))
