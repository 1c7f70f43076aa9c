"""Modular pipelines of diffusers, in the form of pipeline classes: their blocks' inputs are a call's arguments, and
their blocks' outputs its result. What looks at pipeline classes needs to know nothing more of them."""

import copy
import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any, ClassVar, get_args, get_origin

import diffusers
import torch
from diffusers.guiders.guider_utils import BaseGuidance
from diffusers.modular_pipelines.modular_pipeline import ModularPipeline, ModularPipelineBlocks
from diffusers.pipelines.pipeline_utils import DiffusionPipeline

from services.diffusion import found, loaded
from services.diffusion.modular_index import NO_CODE, Index

_GIVEN: Mapping[str, Any] = {"prompt": "a", "num_frames": 9, "num_inference_steps": 9}
"""What each request brings. Blocks look at what is there, and some at how many frames."""
_PICTURE, _MASK = {"image": True}, {"mask_image": True}
_WORDS = {"": {}, "Img2Img": _PICTURE, "Inpaint": _PICTURE | _MASK}
"""Task, as names of pipeline classes say it -> what its requests bring beside that."""
_PACKED = re.compile(r"vae_scale_factor\w* \* 2\b")
_ONLY_PIL = re.compile(r"""output_type != ["']pil["']""")
_LAYERS = "layers"  # an input of blocks that make several pictures of one


@dataclass(frozen=True)
class _Guider:
    """A component that combines a step's calls. `argument`: its scale's name in a call. `scale`: its own."""

    component: str
    argument: str
    scale: float


class BlocksPipeline(ModularPipeline, DiffusionPipeline):  # pyright: ignore[reportIncompatibleMethodOverride]
    """A modular pipeline as a pipeline class of one task. `pipeline_class` makes the classes.

    Attributes:
        index: of the checkpoint.
        own_blocks: all of the pipeline's blocks; what a call brings decides which of them run.
        wanted: components that its task reads from the checkpoint.
        packs: latents, along a side, that are one entry of what the model reads.
        guiders: whose scales are arguments of the call.
        only_pil: whether its pictures can only be had as PIL's.
        usual_frames: of a video whose blocks do not say how many they make.
        fields: field of the call's result, as pipeline classes name it -> output of the blocks.
        variants: words as in `Img2Img` -> the class of that task, which has the same components.
    """

    index: ClassVar[Index]
    own_blocks: ClassVar[ModularPipelineBlocks]
    wanted: ClassVar[frozenset[str]]
    packs: ClassVar[int]
    guiders: ClassVar[tuple[_Guider, ...]]
    only_pil: ClassVar[bool]
    usual_frames: ClassVar[int] = 121
    fields: ClassVar[Mapping[str, str]]
    variants: ClassVar[Mapping[str, type["BlocksPipeline"]]] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # DiffusionPipeline's writes the config, in another form

    @classmethod
    def from_pretrained(cls, folder: Any, **options: Any) -> "BlocksPipeline":  # type: ignore[override]
        """Loads the components of its task and of its variants.

        Args:
            folder: not read: `index` knows it.
            options: `dtype`, and `quantization_config` of the components.

        Raises:
            ValueError: files of a component are missing.
        """
        wanted = cls.wanted.union(*(each.wanted for each in cls.variants.values()))
        entries = cls.index.local(wanted)
        pipeline = cls(copy.deepcopy(cls.own_blocks), cls.index.folder, modular_config_dict=entries)
        names = [name for name in pipeline.pretrained_component_names if name in wanted and name in entries]
        pipeline.load_components(names, **_for_components(options, names))
        if missing := [name for name in names if getattr(pipeline, name, None) is None]:
            raise ValueError(f"{cls.index.folder.name}: its {missing[0]} cannot be loaded; the log says why")
        pipeline.model_cpu_offload_seq = "->".join(
            name for name, part in pipeline.components.items() if isinstance(part, torch.nn.Module)
        )
        for block in _leaves(pipeline._blocks):
            if hasattr(block, "set_progress_bar_config"):
                block.set_progress_bar_config(disable=True)
        return pipeline

    def variant(self, name: str) -> "BlocksPipeline | None":
        """The pipeline of the variant class `name` with the same components; None: there is none."""
        for cls in self.variants.values():
            if cls.__name__ == name:
                made = object.__new__(cls)
                vars(made).update(vars(self))
                return made
        return None

    def run_blocks(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The call: of `fields`, those that the blocks have made."""
        view = copy.copy(self)
        for guider in self.guiders:
            scale = arguments.pop(guider.argument, None)
            if scale is not None and (own := getattr(self, guider.component, None)) is not None:
                vars(view)[guider.component] = type(own).from_config(own.config, guidance_scale=scale)
        if self.only_pil:
            arguments["output_type"] = "pil"
        state = ModularPipeline.__call__(view, **arguments)
        made = {field: state.get(output) for field, output in self.fields.items()}
        return {field: value for field, value in made.items() if value is not None}


def pipeline_class(folder: Path) -> type[BlocksPipeline]:
    """Of a checkpoint with a modular index: that of the first task that requests can ask for, with variants. Its
    `__call__` has the signature that the task's blocks say. Reads no weights.

    Raises:
        ValueError: no class of diffusers, code that comes with the checkpoint, or components that are nowhere.
    """
    return _pipeline_class(folder, (folder / Index.NAME).read_text())


@lru_cache(maxsize=4)  # blocks take seconds to say what they are
def _pipeline_class(folder: Path, said: str) -> type[BlocksPipeline]:
    """`said`: what the index is, so that a changed one is read again."""
    index = Index(folder)
    cls, blocks = _known(index)
    tasks = {word: made for word in _WORDS if (made := _task_class(cls, blocks, index, word)) is not None}
    whole = {word: made for word, made in tasks.items() if not _lacks(made)}
    if not whole:
        lacking = _lacks(next(iter(tasks.values())))[0]
        raise ValueError(f"{folder.name}: {index.NAME} names no files for its {lacking}, which {cls.__name__} needs")
    return _joined(cls, whole)


def described_class(cls: type[ModularPipeline]) -> type[BlocksPipeline]:
    """As `pipeline_class`, of a modular class without a checkpoint."""
    blocks = getattr(diffusers, str(cls.default_blocks_name))()
    return _joined(cls, {word: made for word in _WORDS if (made := _task_class(cls, blocks, None, word)) is not None})


def _joined(cls: type[ModularPipeline], tasks: Mapping[str, type[BlocksPipeline]]) -> type[BlocksPipeline]:
    """The first task's that requests can ask for, under the modular pipeline's own name, with the others."""
    served = {word: made for word, made in tasks.items() if found.why_not(made) is None} or tasks
    main, *others = served
    made = served[main]
    made.__name__ = made.__qualname__ = cls.__name__
    taken = ["Img2Img"] if found.picture_of(made) else []
    made.variants = {word: served[word] for word in others if word not in taken}
    return made


def _known(index: Index) -> tuple[type[ModularPipeline], ModularPipelineBlocks]:
    """The classes of diffusers that an index names. Raises ValueError."""
    name = index.class_name
    cls = getattr(diffusers, name, None) if isinstance(name, str) else None
    if not (inspect.isclass(cls) and issubclass(cls, ModularPipeline)):
        have = f"diffusers {diffusers.__version__} has no such modular pipeline, or lacks a package for it"
        raise ValueError(f"{index.NAME} names {name!r}: {have}; {NO_CODE}")
    given = index.blocks_name or cls.default_blocks_name
    made = getattr(diffusers, given, None) if isinstance(given, str) else None
    if inspect.isclass(made) and issubclass(made, ModularPipelineBlocks):
        if not getattr(made, "block_classes", None):  # blocks that were put together leave no name of their own
            made = getattr(diffusers, str(cls.default_blocks_name), None)
        if made is not None:
            return cls, made()
    raise ValueError(
        f"{index.NAME} names the blocks {given!r}, which diffusers {diffusers.__version__} does not have; {NO_CODE}"
    )


def _task_class(
    cls: type[ModularPipeline], blocks: ModularPipelineBlocks, index: Index | None, word: str
) -> type[BlocksPipeline] | None:
    """None: the blocks do nothing of that."""
    brought = _WORDS[word]
    if not brought.keys() <= {each.name for each in blocks.inputs}:
        return None
    run = blocks.get_execution_blocks(**_GIVEN, **brought)
    inputs = [each for each in run.inputs if each.name is not None and not each.name.startswith("_")]
    if not brought.keys() <= {each.name for each in inputs}:
        return None
    guiders = tuple(_guiders(run, index))
    classic = getattr(diffusers, cls.__name__.replace("ModularPipeline", "Pipeline"), None)
    known = found.parameters_of(classic) if classic is not None and classic is not cls else {}
    parameters = [Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)]
    for each in {each.name: each for each in inputs}.values():
        is_needed = each.name in brought or (each.required and each.default is None)
        default = Parameter.empty if is_needed else each.default
        kind = _type_of(each, known)
        parameters.append(Parameter(each.name, Parameter.KEYWORD_ONLY, default=default, annotation=kind))
    taken = {each.name for each in parameters}
    for guider in guiders:
        if guider.argument not in taken:
            named = Parameter(guider.argument, Parameter.KEYWORD_ONLY, default=guider.scale, annotation=float)
            parameters.append(named)
    outputs, sources = {each.name for each in run.outputs}, [inspect.getsource(type(each)) for each in _leaves(run)]
    members: dict[str, Any] = {
        "__call__": _call_of(Signature(parameters)),
        "__module__": cls.__module__,
        "index": index,
        "own_blocks": blocks,
        "wanted": frozenset(each.name for each in run.expected_components),
        "packs": 2 if any(map(_PACKED.search, sources)) else 1,
        "only_pil": any(map(_ONLY_PIL.search, sources)),
        "guiders": tuple(guider for guider in guiders if guider.argument not in taken),
        "fields": {} if _LAYERS in taken else _fields(outputs),
    }
    name = cls.__name__.replace("ModularPipeline", f"{word}ModularPipeline")
    return type(name, (BlocksPipeline, cls), members)


def _call_of(signature: Signature) -> Any:
    def __call__(self: BlocksPipeline, **arguments: Any) -> dict[str, Any]:
        return self.run_blocks(arguments)

    __call__.__signature__ = signature  # type: ignore[attr-defined]
    return __call__


def _fields(outputs: set[str]) -> dict[str, str]:
    """As `BlocksPipeline.fields`."""
    sound = next((name for name in ("audio", "sound") if name in outputs), None)
    if "videos" in outputs:
        return {"frames": "videos"} | ({"audio": sound} if sound else {})
    fields = {name: name for name in ("images", "audios") if name in outputs}
    return fields or ({"audios": sound} if sound else {})


def _guiders(run: ModularPipelineBlocks, index: Index | None) -> Iterable[_Guider]:
    """Those that are on, and have a scale."""
    for each in run.expected_components:
        cls, name, config = each.type_hint, str(each.name), dict(each.config or {})
        if not inspect.isclass(cls) or not issubclass(cls, BaseGuidance):
            continue
        if index is not None and (stored := index.guider(name)) is not None:
            cls, config = stored
        scale = inspect.signature(cls.__init__).parameters.get("guidance_scale")
        if scale is not None and config.get("enabled", True):
            argument = name.replace("guider", "guidance_scale")
            yield _Guider(name, argument, config.get("guidance_scale", scale.default))


def _type_of(each: Any, classic: found.Parameters) -> Any:
    """What an input says of its type; else its default's, else that of the classic pipeline's argument."""
    kind, default = each.type_hint, each.default
    if kind is None and isinstance(default, (bool, int, float, str, list, tuple)):
        kind = type(default)
    if kind in (list, tuple) and isinstance(default, (list, tuple)) and len(set(map(type, default))) == 1:
        part = type(default[0])
        kind = list[part] if kind is list else tuple[part, ...]
    if get_origin(kind) is tuple and len(get_args(kind)) == 1:  # it means any number of them
        kind = tuple[get_args(kind)[0], ...]
    if kind is None and each.name in classic:
        kind = classic[each.name].annotation
    return Parameter.empty if kind is None else kind


def _leaves(blocks: Any) -> Iterable[Any]:
    """All blocks within some."""
    for block in getattr(blocks, "sub_blocks", {}).values():
        yield block
        yield from _leaves(block)


def _lacks(cls: type[BlocksPipeline]) -> list[str]:
    """Models of its task without which no call works, and for which the index names no files."""
    wanted = {each.name: each.type_hint for each in cls.own_blocks.expected_components if each.name in cls.wanted}
    needed = [
        name for name, kind in wanted.items() if name == "vae" or (inspect.isclass(kind) and loaded.is_denoiser(kind))
    ]
    return [name for name in needed if not cls.index.names(name)]


def denoisers_of(cls: type[DiffusionPipeline]) -> list[str]:
    """Components of its checkpoint that are called at each step."""
    assert issubclass(cls, BlocksPipeline)
    own = {each.name: each.type_hint for each in cls.own_blocks.expected_components}
    named = [name for name in sorted(cls.wanted) if cls.index.names(name)]
    kinds = {name: cls.index.class_of(name) or own.get(name) for name in named}
    return [name for name, kind in kinds.items() if inspect.isclass(kind) and loaded.is_denoiser(kind)]


def _for_components(options: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Of options of a pipeline, those of loading components."""
    given = dict(options)
    quantization = given.pop("quantization_config", None)
    if quantization is not None:
        configs = {name: quantization._resolve_quant_config(is_diffusers=True, module_name=name) for name in names}
        given["quantization_config"] = {name: config for name, config in configs.items() if config is not None}
    return given
