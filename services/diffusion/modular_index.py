"""The index of a modular checkpoint: which classes and components it names, and where their files are."""

import contextlib
import inspect
import json
from collections.abc import Collection, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import diffusers
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from huggingface_hub import snapshot_download

MODULAR_INDEX, INDEX = "modular_model_index.json", "model_index.json"
NO_CODE = "code that comes with a checkpoint is not run"
_LIBRARIES = ("diffusers", "transformers")
_CODE = "modular_config.json"  # it says which file has the blocks


def is_modular(folder: Path) -> bool:
    """Whether a checkpoint is served by its modular index: there is no other that names a pipeline class."""
    if not (folder / MODULAR_INDEX).is_file():
        return False
    if not (folder / INDEX).is_file():
        return True
    name = json.loads((folder / INDEX).read_text()).get("_class_name")
    cls = getattr(diffusers, name, None) if isinstance(name, str) else None
    return not (inspect.isclass(cls) and issubclass(cls, DiffusionPipeline))


class Index:
    """What `modular_model_index.json` says.

    Attributes:
        folder: the checkpoint's.
        class_name, blocks_name: of the pipeline, and of its blocks; None: it names none.

    Raises:
        ValueError: the checkpoint has code of its own, or names classes of other libraries.
    """

    NAME = MODULAR_INDEX

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._entries: dict[str, Any] = json.loads((folder / MODULAR_INDEX).read_text())
        self.class_name: Any = self._entries.get("_class_name")
        self.blocks_name: Any = self._entries.get("_blocks_class_name")
        own = json.loads((folder / _CODE).read_text()) if (folder / _CODE).is_file() else {}
        if own.get("auto_map"):
            raise ValueError(f"{folder.name}: {_CODE} names blocks of the checkpoint's own: {NO_CODE}")
        for name, entry in self.components().items():
            library, cls = entry["type_hint"] or (None, None)
            if library is not None and library.partition(".")[0] not in _LIBRARIES and not _is_of_pipelines(library):
                raise ValueError(
                    f"{MODULAR_INDEX}: its {name} is {library}.{cls}, of no library that is served; {NO_CODE}"
                )

    def components(self) -> dict[str, dict[str, Any]]:
        """Name -> `type_hint`, its library and class, and where it is: `pretrained_model_name_or_path`, `subfolder`,
        `variant` and `revision`."""
        entries: dict[str, Any] = {
            name: entry[2]
            for name, entry in self._entries.items()
            if isinstance(entry, list) and len(entry) == 3 and isinstance(entry[2], dict)
        }
        return {name: {"type_hint": None} | entry for name, entry in entries.items()}

    def class_of(self, name: str) -> Any:
        """The component's class; None: it is not known here."""
        library, cls = self.components().get(name, {}).get("type_hint") or ("", "")
        if not library or not cls:
            return None
        with contextlib.suppress(ImportError, AttributeError):
            module = library if library.partition(".")[0] in _LIBRARIES else f"diffusers.pipelines.{library}"
            return getattr(import_module(module), cls)
        return None

    def names(self, name: str) -> bool:
        """Whether it says where a component's files are."""
        entry = self.components().get(name)
        return entry is not None and (self._own_folder(entry) is not None or bool(_source(entry)))

    def _own_folder(self, entry: Mapping[str, Any]) -> Path | None:
        folder = self.folder / (entry.get("subfolder") or "")
        return folder if entry.get("subfolder") and folder.is_dir() else None

    def folder_of(self, name: str) -> Path:
        """Of a component that it names. Fetches it if need be. Raises ValueError: it is nowhere."""
        entry = self.components()[name]
        if (own := self._own_folder(entry)) is not None:
            return own
        source, part = _source(entry), entry.get("subfolder") or ""
        if Path(source).is_dir():
            if (Path(source) / part).is_dir():
                return Path(source) / part
            raise ValueError(f"{self.folder.name}: its {name} is neither there nor in {source}")
        try:
            pattern = f"{part}/*" if part else "*"
            fetched = snapshot_download(source, revision=entry.get("revision"), allow_patterns=[pattern])
        except (OSError, ValueError) as error:
            said = str(error).partition("\n")[0]
            where = f"is in {source}, which is neither a directory nor can be fetched from the hub"
            raise ValueError(f"{self.folder.name}: its {name} {where}: {said}") from None
        return Path(fetched) / part

    def local(self, wanted: Collection[str]) -> dict[str, Any]:
        """As the file says, but all `wanted` components are in folders of this machine, and there are no others.

        Raises:
            ValueError: files of one of them are nowhere.
        """
        components = self.components()
        entries = {name: value for name, value in self._entries.items() if name not in components}
        for name in wanted:
            if name in components and self.names(name):
                folder, entry = self.folder_of(name), components[name]
                source, part = (folder.parent, folder.name) if entry.get("subfolder") else (folder, "")
                place = {"pretrained_model_name_or_path": str(source), "subfolder": part, "revision": None}
                entries[name] = [*self._entries[name][:2], entry | place]
        return entries

    def guider(self, name: str) -> tuple[Any, dict[str, Any]] | None:
        """Class and config of a guider that lies in the checkpoint; None: there is none."""
        entry, cls = self.components().get(name), self.class_of(name)
        folder = None if entry is None else self._own_folder(entry)
        if folder is None or cls is None or not (folder / cls.config_name).is_file():
            return None
        return cls, json.loads((folder / cls.config_name).read_text())


def _is_of_pipelines(library: str) -> bool:
    """Whether it is a folder of diffusers' pipelines, as for classes that belong to one of them."""
    return library.isidentifier() and hasattr(diffusers.pipelines, library)


def _source(entry: Mapping[str, Any]) -> str:
    """A directory, or a model of the hub; empty: none."""
    return str(entry.get("pretrained_model_name_or_path") or entry.get("repo") or "")


def fetch(model: str, revision: str | None) -> Path:
    """The folder of a modular checkpoint of the hub, with those of its components that it has itself.

    Raises:
        OSError, ValueError: there is none.
    """
    folder = Path(snapshot_download(model, revision=revision, allow_patterns=["*.json"]))
    if not (folder / MODULAR_INDEX).is_file():
        raise ValueError(f"it has neither {INDEX} nor {MODULAR_INDEX}")
    own = [entry for entry in Index(folder).components().values() if _source(entry) in ("", model)]
    patterns = [f"{entry['subfolder']}/*" for entry in own if entry.get("subfolder")]
    return Path(snapshot_download(model, revision=revision, allow_patterns=[*patterns, "*.json"]))
