"""Runs the production driver on a virtual clock, against actors that do nothing but take time.

`world.run` builds a `grpo_async.Run` whose Ray actors are simulated: its buffer, its two loops, its
fleet, its dispatcher, its packing plans and its weight updates are the code that trains.

    clock.py             an event loop whose time jumps to what happens next
    hardware.py          seconds of tokens, batches and updates
    workload.py          lengths of answers, seconds of environments and judges
    simulated_engine.py  an engine: who waits, who runs, when each ends
    simulated_actors.py  stand-ins for Ray's actors: engines, trainer ranks, rollout workers
    faults.py            who is lost, and when
    world.py             one run, and what it did
    findings.py          what binds, what was waited for, what was lost
    page.py              a picture of some steps
"""
