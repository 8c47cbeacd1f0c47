"""RLVR 1 of Nemotron 3 Super on 27 H100 nodes: 12 generate, 8 train, 7 judge."""

from configs.h100.rlvr1 import *

run_dir = "runs/rlvr_27_nodes"
engine = engine | {"count": 12, "args": engine["args"] | {"gpu_memory_utilization": 0.7}}
policy = policy | {"ranks": 64}
