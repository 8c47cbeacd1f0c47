"""MOPD of Nemotron 3 Ultra, scored by five teachers: 111 B200 nodes, 5 for judges."""

from configs._ultra import *

run_dir = "runs/ultra_mopd"
model = "runs/ultra_rlvr/step_000178/hf"
data = {"train": "data/ultra/mopd/train-split.jsonl"}
steps = 80
save_period = 6
save_before = 1800
val_period = 0
rollout_workers = 64

teachers = {
    "general": "runs/ultra_rlvr/step_000178/hf",
    "ifbench": "runs/ultra_ifbench/step_000100/hf",
    "rlhf": "runs/ultra_rlhf/step_000100/hf",
    "reasoning": "runs/ultra_reasoning/step_000100/hf",
    "swe": "runs/ultra_swe/step_000960/hf",
}
routes = {
    "instruction_following_simple_agent": "ifbench",
    "abstention_simple_agent": "ifbench",
    "multichallenge_simple_agent": "ifbench",
    "genrm_simple_agent": "rlhf",
    "genrm_simple_agent_reasoning_off": "rlhf",
    "math_with_judge_simple_agent": "reasoning",
    "equivalence_llm_judge_simple_agent": "reasoning",
    "mcqa_simple_agent": "reasoning",
    "ns_tools_simple_agent": "reasoning",
    "code_gen_simple_agent": "reasoning",
    "swe_pivot_single_step_tool_use_with_argument_comparison_agent": "swe",
    "swe_pivot_tool_simulation_agent": "swe",
    "droid_pivot_single_step_tool_use_with_argument_comparison_agent": "swe",
    "structured_outputs_v3_simple_agent": "swe",
    "terminal_multi_harness_opencode_agent": "swe",
    "terminal_multi_harness_agent006_agent": "swe",
    "terminal_multi_harness_codex_agent": "swe",
    "freeform_formatting_simple_agent": "swe",
    "citation_format_simple_agent": "swe",
}
default_teacher = "general"
verify = False

prompts_per_step = 1024
group_size = 1
sampling = sampling | {"max_model_len": 196608, "max_response_tokens": 196608}
engine = engine | {"count": 64}
policy = policy | {"ranks": 256, "lr": 2e-6, "cp": 32, "row_tokens": 196608}
teacher_policy = {
    "kind": "megatron",
    "ranks": 16,
    "tp": 8,
    "cp": 2,
    "ep": 16,
    "row_tokens": 196608,
    "megatron": {"model": {"moe_permute_fusion": True}},
}
