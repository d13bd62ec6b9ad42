"""Which tests outside of `tests/faults` try which faults of `docs/faults.md`. As a script: their names, for pytest."""

from __future__ import annotations

STRANGERS = "tests/multiproc/test_ranks_strangers.py::"

#: For each fault, tests elsewhere and what they inject.
COVER = {
    "F1": {"tests/cli/test_cli_restarts.py::test_a_killed_rank": "a rank of the command line, restarted"},
    "F2": {
        "tests/multiproc/test_ranks_launch.py::test_torchrun_with_a_failing_stage": "a stage raises under torchrun",
        "tests/cli/test_cli_bad_input.py::test_failure_in_user_code_shows_its_traceback_once": "a user's model raises",
    },
    "F3": {"tests/multiproc/test_ranks_start.py::test_stopped_before_there_is_a_run": "SIGSTOP while starting"},
    "F5": {
        "tests/multiproc/test_ranks_launch.py::test_launcher_that_is_ended": "the launcher is ended",
        "tests/multiproc/test_signals.py::test_a_stopped_rank_ends_with_its_launcher": "with a rank that is stopped",
    },
    "F6": {
        "tests/cli/test_cli_signals.py::test_two_processes_save_and_say_how_to_go_on": "to the command line",
        "tests/cli/test_cli_signals.py::test_a_second_signal_ends_at_once": "a second one to the command line",
        "tests/multiproc/test_signals.py::test_ranks_that_heed_save_before_they_end": "to launcher, rank or group",
        "tests/multiproc/test_signals.py::test_a_second_signal_ends_all_at_once": "a second signal",
        "tests/multiproc/test_signals.py::test_signals_while_ranks_start": "while ranks start",
    },
    "F7": {
        "tests/io/test_checkpoint.py::test_killed_at_any_moment_the_old_or_the_new_one_is_whole": "at any step",
        "tests/io/test_checkpoint.py::test_killed_in_the_middle_of_writing_bytes": "between two bytes",
    },
    "F8": {
        "tests/io/test_checkpoint.py::test_every_flipped_bit_is_found": "a flipped bit",
        "tests/io/test_checkpoint.py::test_cut_off": "cut off",
        "tests/train/test_sessions.py::test_a_damaged_latest_is_named": "the latest of a session",
    },
    "F9": {
        "tests/io/test_checkpoint.py::test_disk_errors_at_any_flush": "an error at any flush",
        "tests/io/test_full_disk.py::test_training_goes_on_while_no_checkpoint_fits": "no checkpoint fits",
        "tests/io/test_full_disk.py::test_a_run_on_a_read_only_disk": "read-only",
        "tests/io/test_full_disk.py::test_a_run_on_a_disk_that_is_full_at_its_end": "full at the end",
    },
    "F10": {
        "tests/multiproc/test_ranks_checkpoint.py::test_other_stages_methods_and_plain_pytorch": "drained",
        "tests/train/test_other_runs.py::test_any_run_is_finished_on_load": "with batches under way",
    },
    "F11": {
        "tests/multiproc/test_exact_resume.py::test_on_ranks": "every kind of method on two ranks",
        "tests/multiproc/test_exact_resume.py::test_on_ranks_with_larger_updates": "several batches per update",
        "tests/multiproc/test_exact_resume.py::test_from_ranks_to_one_process": "from ranks to one process",
        "tests/train/test_sessions.py::test_stopped_anywhere": "a session stopped anywhere",
        "tests/multiproc/test_restarts.py::test_torchrun_restarts": "killed and restarted by torchrun",
    },
    "F12": {"tests/multiproc/test_ranks_edges.py::test_batch_sizes": "short, large and single-sample batches"},
    "F13": {
        "tests/train/test_not_finite.py::test_gradient_at_any_stage": "a gradient that is infinite",
        "tests/multiproc/test_ranks_not_finite.py::test_left_out_on_all_stages": "left out on all stages",
        "tests/multiproc/test_ranks_not_finite.py::test_stop_leaves_the_last_good_state": "last good state saved",
    },
    "F14": {"tests/multiproc/test_ranks_loaders.py::test_training_on_two_ranks": "raises, ends early, differs"},
    "F16": {
        "tests/multiproc/test_ranks_start.py::test_a_rank_that_never_comes": "a rank never comes",
        "tests/multiproc/test_ranks_start.py::test_a_port_that_is_taken": "the port is taken",
    },
    "F17": {"tests/io/test_full_disk.py::test_two_runs_in_one_folder": "in one folder"},
    "F18": {"tests/runtime/test_transport.py::test_tampering_is_refused": "tampering, both directions"},
    "F19": {"tests/runtime/test_transport.py::test_a_fast_sender_is_held_back_by_the_schedule": "a fast sender"},
    "F20": {
        "tests/nn/test_chain_check.py::test_tied_weights_may_be_cut_apart": "weights tied across a cut",
        "tests/multiproc/test_ranks_edges.py::test_frozen_stage": "a frozen stage",
        "tests/multiproc/test_ranks_edges.py::test_parameter_free_stage": "a stage without parameters",
    },
    "F21": {
        "tests/multiproc/test_ranks_memory.py::test_a_stage_without_memory": "a stage gets no more memory",
        "tests/multiproc/test_ranks_memory.py::test_a_rank_that_the_system_kills": "the system kills a rank",
    },
    "F22": {"tests/runtime/test_health.py::test_who_was_suspended_blames_nobody_for_it": "the clock jumps"},
    "F23": {"tests/multiproc/test_restarts.py::test_a_loop_without_progress_ends": "the same failure in each start"},
    "F24": {
        "tests/petra/test_petra_errors.py::test_a_bad_reconstruction_is_named_with_the_cure": "measured and named",
        "tests/petra/test_petra_reconstruction.py::test_stored_inputs_stop_the_error": "the cure: stored inputs",
    },
    "hosts": {
        "tests/multiproc/test_hosts.py::test_the_loss_of_a_host_ends_the_run_on_all_others": "cut off or killed",
    },
    "strangers": {
        STRANGERS + "test_everything_listens_on_loopback_only": "who listens where",
        STRANGERS + "test_a_stranger_changes_nothing_and_a_kill_is_still_noticed_at_once": "forged and malformed notes",
    },
}

#: The same by test.
ELSEWHERE = {test: (fault, injected) for fault, tests in COVER.items() for test, injected in tests.items()}

if __name__ == "__main__":
    print("\n".join(ELSEWHERE))
