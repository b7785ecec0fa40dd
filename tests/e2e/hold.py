"""Program text that holds a fine-tuning run back, so that a test's next command always finds it running.

A held run has trained up to a step (or to each of several: "3-4"), and continues when `stop` or `go` appears in its run
directory. The text is a `sitecustomize` module, which Python imports at start-up, in an image too. It adds the wait to
the trainer's log of a step.
"""

SITECUSTOMIZE = """\
import os, pathlib, sys, time

DEADLINE_S = 900


def hold_at(steps):
    from hpc_rl.tracking.tracker import Tracker

    log = Tracker.log
    run = pathlib.Path(os.environ["HPC_RL_RUN_DIR"])

    def log_and_hold(self, number, metrics, *arguments):
        log(self, number, metrics, *arguments)
        deadline = time.monotonic() + DEADLINE_S
        is_end = number in steps and "timing_s/step" in metrics  # its last line, after it was saved
        while is_end and not (run / "stop").exists() and not (run / "go").exists():
            if time.monotonic() > deadline:
                raise SystemExit(f"held at step {number} for {DEADLINE_S} s")
            time.sleep(0.05)

    Tracker.log = log_and_hold


arguments = sys.orig_argv
if "HOLD_AT_STEP" in os.environ and "-m" in arguments[:-1]:
    if arguments[arguments.index("-m") + 1] == "hpc_rl.finetune.train":
        try:
            hold_at([int(step) for step in os.environ["HOLD_AT_STEP"].split("-")])
        except Exception as error:  # Python would ignore it and start the program
            raise SystemExit(f"this run cannot be held: {error!r}")
"""
