"""The code predictor compiled for a CPU, where most of a frame's time goes into starting a thousand small kernels."""

import torch
import torch._dynamo
import torch._inductor.config as inductor_config
import torch.fx.experimental._config as shapes_config

from services.talker.attend import KeyValueCache
from services.talker.predictor import CodePredictor
from services.talker.sampling import DrawRules, SamplingRows

_COMPILED_ROWS = 4  # any number but 0 and 1, for which torch compiles programs of their own


class CompiledPredictor:
    """`CodePredictor.forward` as one program for any number of rows, and for each of `WIDTHS`.

    All is compiled by the constructor, in about half a minute a program. What should need another one all the same
    runs eagerly: no request waits for a compiler.

    Args:
        predictor: loaded, in float32 or bfloat16 on a CPU.
        slots: most rows.

    Raises:
        RuntimeError: there is no C++ compiler (torch's InvalidCxxCompiler), or it failed.
    """

    WIDTHS = (0, 64)  # codes that a row keeps at most; 0: all rows are greedy

    def __init__(self, predictor: CodePredictor, slots: int) -> None:
        weight = predictor.model.norm.weight
        # One row more than is ever in use, so that those in use are always a part: a whole would be another program.
        self._cache: KeyValueCache = predictor.new_cache(max(slots, _COMPILED_ROWS) + 1)
        self._forward = torch.compile(predictor.forward, fullgraph=True)
        rules = SamplingRows.empty(_COMPILED_ROWS, weight.device)
        rows = weight.new_zeros(_COMPILED_ROWS, weight.shape[0])
        codes = torch.zeros(_COMPILED_ROWS, dtype=torch.long)
        noise = torch.zeros(predictor.groups, _COMPILED_ROWS)
        # Sizes that happen to be equal mean nothing; and no worker processes stay behind.
        patched = shapes_config.patch(use_duck_shape=False)  # pyright: ignore[reportAttributeAccessIssue]
        with patched, inductor_config.patch(compile_threads=1):
            for width in self.WIDTHS:
                self._run(rows, codes, rows.clone(), rules.first(_COMPILED_ROWS, width), noise, compiles=True)

    def width(self, asked: int) -> int | None:
        """The least of `WIDTHS` for rows that keep `asked` codes; None: they must run without this."""
        return next((width for width in self.WIDTHS if width >= asked), None)

    def __call__(
        self,
        hidden: torch.Tensor,
        first: torch.Tensor,
        first_row: torch.Tensor,
        rules: DrawRules,
        noise: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `CodePredictor.forward`, with one of `WIDTHS` and `noise` (groups, rows)."""
        with torch.compiler.set_stance("eager_on_recompile"):
            if len(first) > 1:
                return self._run(hidden, first, first_row, rules, noise)
            twice = DrawRules(rules.width, *(rule.repeat(2, 1) for rule in rules[1:]))
            noise = None if noise is None else noise.repeat(1, 2)
            codes, row = self._run(hidden.repeat(2, 1), first.repeat(2), first_row.repeat(2, 1), twice, noise)
            return codes[:1], row[:1]

    def _run(
        self,
        hidden: torch.Tensor,
        first: torch.Tensor,
        first_row: torch.Tensor,
        rules: DrawRules,
        noise: torch.Tensor | None,
        compiles: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cache = self._cache.rows(len(first))
        noise = noise if rules.width else None
        if compiles:
            for tensor in (hidden, first, first_row, *rules[1:]):
                torch._dynamo.mark_dynamic(tensor, 0)
            for tensor in (cache.keys, cache.values, *([] if noise is None else [noise])):
                torch._dynamo.mark_dynamic(tensor, 1)
        return self._forward(cache, hidden, first, first_row, rules, noise)
