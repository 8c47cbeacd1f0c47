"""SWE 1 of Nemotron 3 Super on 20 H100 nodes: 4 generate, 16 train."""

from configs.h100.swe1 import *

run_dir = "runs/swe1_20_nodes"
engine = engine | {"count": 4, "args": engine["args"] | {"gpu_memory_utilization": 0.75}}
policy = policy | {"ranks": 128, "cp": 8, "ep": 16}
