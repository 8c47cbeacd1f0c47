"""Two tiny teachers, each good at one task, make a student good at both."""

from configs.tiny import *

run_dir = "runs/tiny-mopd-{seed}-{time}"
teachers = {"spells": "models/tiny_mopd/spells", "sorts": "models/tiny_mopd/sorts"}
routes = {
    "reasoning_gym_simple_agent/spell_backward": "spells",
    "reasoning_gym_simple_agent/number_sorting": "sorts",
}
teacher_policy = {"row_tokens": 1024}

steps = 160
val_period = 40
prompts_per_step = 64
group_size = 1
policy = policy | {"row_tokens": 512, "lr": 3e-4, "lr_schedule": "linear", "lr_decay_steps": 160}
