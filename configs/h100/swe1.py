"""SWE 1 of Nemotron 3 Super on 64 H100 nodes."""

from configs.swe1 import *

policy = policy | {"cp": 16}
