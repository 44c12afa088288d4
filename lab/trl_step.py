"""A GRPO step of TRL's GRPOTrainer with a multi-turn `rollout_func`: a side of speed.py's table.

It gets what `train_step` gets there: prompts, lengths, differing rewards, a loss on sampled tokens
(`env_mask`), as many optimizer steps, float32, one core. It logs, saves and evaluates nothing.
"""

import copy
import math
import tempfile
import time
import warnings

try:
    import datasets
    import trl
except ImportError:
    raise ImportError("TRL is not installed. Run `.venv/bin/pip install trl==1.16.0`.") from None
from transformers import PrinterCallback, TrainerCallback

VERSION = trl.__version__
MICRO_ROWS = 16  # in one pass; 4, 8 and 64 are not faster


class TRLStep(TrainerCallback):
    """`step()` is one rollout and its optimizer steps. roll: model -> tokens (B, T)"""

    def __init__(self, work, roll, config):
        warnings.filterwarnings("ignore", message=".*rollout_func|.*_checkpointing")
        self.work, self.roll = work, roll
        micro = math.gcd(MICRO_ROWS, config.mini_batch)
        settings = trl.GRPOConfig(
            output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, gradient_checkpointing=False,
            report_to=[], logging_strategy="no", save_strategy="no", disable_tqdm=True,
            dataloader_pin_memory=False, shuffle_dataset=False, learning_rate=config.lr,
            num_generations=config.group_size, generation_batch_size=len(work.prompts),
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=config.mini_batch // micro,
            max_steps=len(work.prompts) // config.mini_batch)
        # To TRL a prompt is the number of its group; `rollout` has the ids.
        prompts = datasets.Dataset.from_dict({"prompt": [str(g) for g in range(config.num_groups)]})
        self.trainer = trl.GRPOTrainer(
            copy.deepcopy(work.policy.model), [reward], settings, prompts,
            processing_class=work.policy.tokenizer, rollout_func=self.rollout, callbacks=[self])
        self.trainer.remove_callback(PrinterCallback)

    def step(self):
        """Returns {part: seconds}, without what `train()` prepares before its first step."""
        self.trainer.train()
        return {"": self.end - self.start, "rollout": self.rollout_seconds}

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 0:
            self.start = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.end = time.perf_counter()

    def rollout(self, prompts, trainer):
        """TRL's `rollout_func`. completion_ids: all after the prompt; env_mask: 1 where sampled;
        logprobs: only vLLM needs them."""
        start, work, args = time.perf_counter(), self.work, self.work.args
        assert prompts == [str(row // args.group_size) for row in range(len(work.prompts))]
        tokens = self.roll(trainer.model)
        turn = [1] * args.new_tokens + [0] * args.observation_tokens
        mask = (turn * args.turns)[:work.length - args.prompt_tokens]
        columns = {"prompt_ids": work.prompts.tolist(), "logprobs": None,
                   "completion_ids": tokens[:, args.prompt_tokens:].tolist(),
                   "env_mask": [mask] * len(prompts)}
        self.rollout_seconds = time.perf_counter() - start
        return columns


def reward(completions, **columns):
    return list(range(len(completions)))
