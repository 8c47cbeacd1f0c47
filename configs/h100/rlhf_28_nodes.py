"""RLHF of Nemotron 3 Super on 28 H100 nodes: 8 generate, 16 train, 4 judge."""

from configs.h100.rlhf import *

run_dir = "runs/rlhf_28_nodes"
engine = engine | {"count": 8, "args": engine["args"] | {"gpu_memory_utilization": 0.75}}
policy = policy | {"ranks": 128}
