"""The code predictor compiled for a CPU, where most of a frame's time goes into starting a thousand small kernels."""

import torch
import torch._dynamo
import torch._inductor.config as inductor_config
import torch.fx.experimental._config as shapes_config

from services.talker.attention import KeyValueCache
from services.talker.predictor import CodePredictor
from services.talker.sampling import PREPARED_WIDTHS, DrawRules, SamplingRows

_COMPILED_ROWS = 4  # any number but 0 and 1, for which torch compiles programs of their own


class CompiledPredictor:
    """`CodePredictor.forward` as one program for any number of rows, and for each of PREPARED_WIDTHS.

    All is compiled by the constructor, in about half a minute a program. What should need another one all the same
    runs eagerly: no request waits for a compiler.

    Args:
        predictor: loaded, in float32 or bfloat16 on a CPU.
        slots: most rows.

    Raises:
        RuntimeError: there is no C++ compiler (torch's InvalidCxxCompiler), or it failed.
    """

    def __init__(self, predictor: CodePredictor, slots: int) -> None:
        weight = predictor.model.norm.weight
        # One row more than is ever in use, so that those in use are always a part: a whole would be another program.
        self._cache: KeyValueCache = predictor.new_cache(max(slots, _COMPILED_ROWS) + 1)
        self._forward = torch.compile(predictor.forward, fullgraph=True)
        # Sizes that happen to be equal mean nothing; and no worker processes stay behind.
        patched = shapes_config.patch(use_duck_shape=False)  # pyright: ignore[reportAttributeAccessIssue]
        with patched, inductor_config.patch(compile_threads=1):
            for width in PREPARED_WIDTHS:
                self._compile(width, weight, predictor.groups)

    def __call__(
        self,
        hidden: torch.Tensor,
        first: torch.Tensor,
        first_row: torch.Tensor,
        rules: DrawRules,
        noise: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `CodePredictor.forward`, with rules of one of PREPARED_WIDTHS."""
        rows = len(first)
        if not rules.width:
            noise = None
        if rows == 1:
            hidden, first, first_row = hidden.repeat(2, 1), first.repeat(2), first_row.repeat(2, 1)
            rules = DrawRules(rules.width, *(rule.repeat(2, 1) for rule in rules[1:]))
            noise = None if noise is None else noise.repeat(1, 2)
        with torch.compiler.set_stance("eager_on_recompile"):
            codes, row = self._forward(self._cache.rows(len(first)), hidden, first, first_row, rules, noise)
        return codes[:rows], row[:rows]

    def _compile(self, width: int, like: torch.Tensor, groups: int) -> None:
        """Compiles the program for `width`. `like` gives hidden size and dtype."""
        cache = self._cache.rows(_COMPILED_ROWS)
        hidden, first_row = (like.new_zeros(_COMPILED_ROWS, len(like)) for _ in range(2))
        first = torch.zeros(_COMPILED_ROWS, dtype=torch.long)
        rules = SamplingRows.empty(_COMPILED_ROWS, like.device).first(_COMPILED_ROWS, width)
        noise = torch.zeros(groups, _COMPILED_ROWS) if width else None
        for tensor in (hidden, first, first_row, *rules[1:]):
            torch._dynamo.mark_dynamic(tensor, 0)
        for tensor in (cache.keys, cache.values, *([] if noise is None else [noise])):
            torch._dynamo.mark_dynamic(tensor, 1)
        self._forward(cache, hidden, first, first_row, rules, noise)
