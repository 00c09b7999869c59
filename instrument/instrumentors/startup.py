"""Startup: what makes a model ready, by the public functions of the frameworks that do it.

The profile's `startup: auto` means function rules of them, whose spans are declared to be of the phase `load` or
`compile`; rules of the profile's own may declare others so. What `torch.compile` compiles is found where it happens,
which is within the first calls of a model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

from instrument.instrumentors.functions import Undo, replace, undo_all
from instrument.instrumentors.rules import Functions
from instrument.instrumentors.verdict import Verdict
from instrument.profile.model import FunctionRule
from instrument.recorder.recorder import RECORDER, Recorder
from instrument.recording.spans import Site

_DYNAMO = "torch._dynamo.callback"

COMPILED = Site(
    "torch.compile",
    "phase",
    _DYNAMO,
    "CompilationCallbackHandler.install_callbacks",
    attributes=(("phase", "compile"),),
)

LOADS = {
    "torch.serialization:load": "torch.load",
    "torch.jit._serialization:load": "torch.jit.load",
    "torch.export:load": "torch.export.load",
    "torch.nn.modules.module:Module.load_state_dict": "load_state_dict",
    "safetensors.torch:load_file": "safetensors.load_file",
    "safetensors.torch:load_model": "safetensors.load_model",
    "transformers.modeling_utils:PreTrainedModel.from_pretrained": "from_pretrained (model)",
    "transformers.tokenization_utils_base:PreTrainedTokenizerBase.from_pretrained": "from_pretrained (tokenizer)",
    "transformers.processing_utils:ProcessorMixin.from_pretrained": "from_pretrained (processor)",
    "onnxruntime.capi.onnxruntime_inference_collection:InferenceSession.__init__": "onnxruntime.InferenceSession",
    "keras.src.saving.saving_api:load_model": "keras.load_model",
    "joblib.numpy_pickle:load": "joblib.load",
}
COMPILES = {
    "torch.jit._freeze:freeze": "torch.jit.freeze",
    "torch.export:export": "torch.export.export",
}
"""The names of each function's spans. `torch.jit.trace` and `script` are left alone: they look names up in the
frame that calls them, which must be the host's."""

RULES = tuple(
    FunctionRule((target,), name=name, kind="phase", phase=phase, text="startup")
    for phase, targets in (("load", LOADS), ("compile", COMPILES))
    for target, name in targets.items()
)


class StartupWatch:
    """The profile's `startup: auto` at work."""

    def __init__(self, rules: Sequence[str] = ("auto",), recorder: Recorder = RECORDER) -> None:
        self.rules = tuple(rules)
        self._recorder = recorder
        self._functions = Functions(RULES if rules else (), recorder)
        self._undos: list[Undo] = []
        self._dynamo: Verdict | None = None

    def change(self, rules: Sequence[str], modules: Iterable[ModuleType]) -> None:
        """Begin or end to record."""
        self.rules = tuple(rules)
        loaded = list(modules)
        self._functions.change(RULES if rules else (), loaded)
        if not rules:
            self._leave_dynamo()
        for module in loaded if rules else ():
            if module.__name__ == _DYNAMO:
                self._watch_dynamo(module)

    def probed(self) -> Mapping[str, Any]:
        """Return the functions that record."""
        return self._functions.probed()

    def wants(self, module_name: str) -> bool:
        """Return True where that module has functions that load or compile."""
        return module_name == _DYNAMO or self._functions.is_named(module_name)

    def imported(self, module: ModuleType) -> bool:
        """Attach to what a module of a framework has."""
        if module.__name__ == _DYNAMO:
            self._watch_dynamo(module)
            return False
        return self._functions.imported(module)

    def undo(self) -> None:
        """Give every framework its own functions back."""
        self._leave_dynamo()
        self._functions.undo()

    def verdicts(self) -> list[Verdict]:
        """Return the verdicts on the functions that record. Frameworks that are not imported are not missed."""
        found = [verdict for verdict in self._functions.verdicts() if verdict.state not in ("waiting", "not found")]
        if self._dynamo is not None:
            found.append(self._dynamo)
        # Without their sites, for nobody has to call all of them.
        return [dataclasses.replace(verdict, site=None) for verdict in found]

    def _leave_dynamo(self) -> None:
        undo_all(self._undos)
        self._dynamo = None

    def _watch_dynamo(self, module: ModuleType) -> None:
        """Record each compilation as a span of the thread that waits for it.

        torch runs its callbacks by this method; of several threads only the first and the last call them.
        """
        if self._undos:
            return
        owner = getattr(module, "CompilationCallbackHandler", None)
        method = vars(owner).get("install_callbacks") if isinstance(owner, type) else None
        if not isinstance(method, FunctionType):
            why = "this version of torch does not tell when it compiles"
            self._dynamo = Verdict("startup", "unreachable", "torch.compile", why)
            return
        recorder, span = self._recorder, self._recorder.span_of(COMPILED)

        @contextmanager
        def install_callbacks(self: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
            if not recorder.on:
                with method(self, *args, **kwargs):
                    yield
                return
            with span(), method(self, *args, **kwargs):
                yield

        self._undos.append(replace(owner, "install_callbacks", install_callbacks))
        self._dynamo = Verdict("startup", "attached", "torch.compile")
