"""Which tests outside of `tests/faults` try which faults of `docs/faults.md`. As a script: their names, for pytest."""

from __future__ import annotations

#: For each test, the faults that it tries and what it injects.
ELSEWHERE: dict[str, list[tuple[str, str]]] = {
    "tests/multiproc/test_ranks_launch.py::test_torchrun_with_a_failing_stage": [
        ("F2", "a stage raises under torchrun")
    ],
    "tests/multiproc/test_ranks_launch.py::test_launcher_that_is_ended": [("F5", "the launcher is ended")],
    "tests/cli/test_cli_stopping.py::test_an_interrupted_run_leaves_a_checkpoint_and_nobody_behind": [
        ("F6", "SIGINT to the command line")
    ],
    "tests/io/test_checkpoint.py::test_killed_at_any_moment_the_old_or_the_new_one_is_whole": [
        ("F7", "SIGKILL at any step of writing a checkpoint")
    ],
    "tests/io/test_checkpoint.py::test_killed_in_the_middle_of_writing_bytes": [("F7", "SIGKILL between two bytes")],
    "tests/io/test_checkpoint.py::test_every_flipped_bit_is_found": [("F8", "a flipped bit of a checkpoint")],
    "tests/io/test_checkpoint.py::test_cut_off": [("F8", "a checkpoint cut off")],
    "tests/io/test_checkpoint.py::test_disk_errors_at_any_flush": [("F9", "a disk error at any flush")],
    "tests/multiproc/test_ranks_checkpoint.py::test_other_stages_methods_and_plain_pytorch": [
        ("F10", "other stages, method, plain PyTorch")
    ],
    "tests/multiproc/test_ranks_checkpoint.py::test_resuming_is_exact": [("F11", "stop and resume on two ranks")],
    "tests/equivalence/test_state.py::test_a_rebuilt_run_goes_on_as_the_untouched_one": [
        ("F11", "state taken mid-flight, rebuilt")
    ],
    "tests/multiproc/test_ranks_edges.py::test_batch_sizes": [("F12", "short, large and single-sample batches")],
    "tests/runtime/test_transport.py::test_tampering_is_refused": [("F18", "tampering, both directions")],
    "tests/runtime/test_transport.py::test_a_fast_sender_is_held_back_by_the_schedule": [("F19", "a fast sender")],
    "tests/nn/test_chain_check.py::test_tied_weights": [("F20", "weights tied across a cut")],
    "tests/multiproc/test_ranks_edges.py::test_frozen_stage": [("F20", "a frozen stage")],
    "tests/multiproc/test_ranks_edges.py::test_parameter_free_stage": [("F20", "a stage without parameters")],
    "tests/runtime/test_health.py::test_who_was_suspended_blames_nobody_for_it": [("F22", "the clock jumps")],
    "tests/petra/test_petra_errors.py::test_a_bad_reconstruction_is_named_with_the_cure": [
        ("F24", "inputs reconstructed badly")
    ],
    "tests/petra/test_petra_reconstruction.py::test_stored_inputs_stop_the_error": [("F24", "the cure: stored inputs")],
}

if __name__ == "__main__":
    print("\n".join(ELSEWHERE))
