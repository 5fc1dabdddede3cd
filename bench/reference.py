"""transformers on the same checkpoint: greedy, with its cache, in the same process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from bench.inprocess import Timed


class Reference:
    """The model as transformers runs it, in fp32."""

    def __init__(self, directory: Path) -> None:
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.model = transformers.Glm5NextForConditionalGeneration.from_pretrained(
            directory, dtype=torch.float32
        ).eval()

    def generate(self, prompts: Sequence[Sequence[int]], count: int) -> list[Timed]:
        """``count`` greedy tokens after each prompt, all of one length, as one batch."""
        began = time.perf_counter()
        results = [Timed() for _ in prompts]
        step, cache = torch.tensor([list(prompt) for prompt in prompts]), None
        with torch.inference_mode():
            for _ in range(count):
                out = self.model(
                    input_ids=step, past_key_values=cache, use_cache=True, logits_to_keep=1
                )
                cache = out.past_key_values
                step = out.logits[:, -1].argmax(-1, keepdim=True)
                for result, token in zip(results, step[:, 0].tolist(), strict=True):
                    result.ids.append(token)
                now = time.perf_counter() - began
                for result in results:
                    result.total_s = now
                    result.times.append(now)
        return results
