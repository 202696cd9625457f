"""Which tests and cases `make test-all` has and `make test` has not: the marker `full`.

`make test` says once what users are promised: the contract of every store, the parity of every optimizer, every guarantee on the default
storage and on memcached.
"""

from collections.abc import Sequence

import hypothesis
import pytest

FULL = (
    # Redis Cluster beyond its contract: slots that move, and the programs that move them.
    "tests/integration/test_stores_redis_cluster.py",
    # The contract of stores once more, over TLS; that TLS holds strangers off is told by test_tls.py.
    "tests/integration/test_stores_tls.py",
    # Commands and pages for operators, on clusters that something is wrong with.
    "tests/integration/test_bench_command.py",
    "tests/integration/test_cli_operators.py",
    "tests/integration/test_doctor.py",
    "tests/integration/test_doctor_certificates.py",
    "tests/integration/test_eviction_watch.py",
    "tests/integration/test_handbook.py",
    "tests/integration/test_metrics.py",
    "tests/integration/test_monitoring.py",
    "tests/integration/test_nodes_command.py",
    "tests/integration/test_shards_command.py",
    # Half a minute until a subscriber is cut off.
    "tests/integration/test_feed.py::test_a_subscriber_that_reads_nothing",
    # The whole contract again, each time.
    "tests/integration/test_conformance.py::test_a_server_whose",
    "tests/integration/test_conformance.py::test_a_users",
    "tests/integration/test_conformance.py::test_an_interrupted",
    "tests/integration/test_conformance.py::test_what_only",
    # Starts and ends of processes, of which each test needs several.
    "tests/integration/test_publish.py::test_a_target_that_comes_back",
    "tests/integration/test_publish.py::test_no_row_goes_back",
    "tests/integration/test_publish.py::test_publishers_share",
    "tests/integration/test_publish.py::test_rows_that_went",
    "tests/integration/test_cli.py::test_a_demo_that_is_told_to_end",
    "tests/integration/test_fencing_stores.py::test_a_replica_that_takes_over",
    "tests/integration/test_nodes_named_ahead.py",
    "tests/integration/test_paramserver.py::test_a_changed_name",
    "tests/integration/test_paramserver.py::test_a_start_that_finds_its_port_taken",
    "tests/integration/test_leaving.py::test_a_program_that_could_not_deliver",
    "tests/integration/test_local_cluster.py",
    "tests/integration/test_own_packages.py",
    "tests/integration/test_starting_shards.py",
    "tests/integration/test_waiting_shards.py",
    # Jobs of several ranks, and of processes with processes of their own: tests/bridges, test_prefetch_consistency.py say how they train.
    "tests/torch/test_clipping_ranks.py",
    "tests/torch/test_copies.py",
    "tests/torch/test_ddp.py",
    "tests/torch/test_distribute_ddp.py",
    "tests/torch/test_prefetch.py::test_a_data_loader_with_worker_processes",
    "tests/torch/test_prefetch.py::test_a_program_may_end",
    "tests/torch/test_prefetch.py::test_leaving_a_data_loader_early",
    "tests/torch/test_row_checkpoints.py::test_the_bridge_imports_nothing",
    "tests/torch/test_row_checkpoints_ranks.py",
    "tests/torch/test_exact_after_kills.py",
    "tests/torch/test_prefetch.py::test_everything_is_closed",
    "tests/torch/test_prefetch.py::test_processes_forked",
    "tests/torch/test_threads.py",
    "tests/torch/test_without_parameters.py::test_distributed_data_parallel",
    # Whole programs, examples and pages.
    "tests/readers",
    "tests/torch/test_deepfm_program.py::test_a_run_that_is_told_to_end",
    "tests/torch/test_deepfm_program.py::test_the_planted_model_is_learnt",
    "tests/torch/test_deepfm_program.py::test_rows_in_a_cluster_give",
    "tests/torch/test_deepfm_program.py::test_sgd_learns",
    "tests/torch/test_deepfm_resume.py",
    "tests/torch/test_example_dlrm.py",
    "tests/torch/test_example_ngram_lm.py",
    "tests/torch/test_example_two_tower.py",
    "tests/torch/test_page_examples.py",
    "tests/torch/test_serving_examples.py",
    "tests/torch/test_tutorial.py",
    # Optimizers beside those of torch, in whole clusters: tests/parity says it of every rule.
    "tests/torch/test_distribute_equality.py::test_losses_and_rows_are_those_of_the_original_model[memcached-adagrad",
    "tests/torch/test_distribute_equality.py::test_losses_and_rows_are_those_of_the_original_model[memcached-adamw",
    "tests/torch/test_distribute_equality.py::test_losses_and_rows_are_those_of_the_original_model[memcached-sgd-momentum",
    "tests/torch/test_distribute_equality.py::test_losses_and_rows_are_those_of_the_original_model[memcached-sparse-adam",
    # Faults at each further point of a way: tests/models searches the steps, test_ps_barrier.py those of a lost trainer.
    "tests/faults/test_faults_cluster_nodes.py",
    "tests/faults/test_faults_large.py",
    "tests/faults/test_faults_archive.py",  # test_save_load.py: a shard killed in a save, in a load; unit/test_loader.py: at every step
    "tests/faults/test_faults_bytes.py::test_a_save_has_the_rows_that_another_program_wrote_over_or_deleted_in_storage[memcached-True]",
    "tests/faults/test_faults_bytes.py::test_rows_that_another_program_wrote_over_come_back_with_the_next_push_or_repair[memcached-64]",
    "tests/faults/test_faults_copies.py::test_damaged_copies_are_mended",
    "tests/faults/test_faults_copies.py::test_shards_start",
    "tests/faults/test_faults_flash.py::test_a_",
    "tests/faults/test_faults_load.py::test_a_load_over_nodes_that_lost_rows_and_keys_of_another_type_ends_at_the_checkpoint[memcached-3000]",
    "tests/faults/test_faults_load.py::test_a_shard_that_wakes_up",
    "tests/faults/test_faults_load.py::test_rows_created_since",
    "tests/faults/test_faults_load.py::test_writes_that_land_after_the_load",
    "tests/faults/test_faults_moves.py::test_a_dead_node_is_replaced_from_python",
    "tests/faults/test_faults_moves.py::test_a_node_that_loses_its_rows_in_the_middle",
    "tests/faults/test_faults_moves.py::test_a_node_without_room",
    "tests/faults/test_faults_moves.py::test_a_shard_that_is_killed_in_any_phase",
    "tests/faults/test_faults_moves.py::test_who_slept_through_all_of_it",
    "tests/faults/test_faults_optimizer_state.py",
    "tests/faults/test_faults_repair.py::test_a_pull_from_a_lost_node",
    "tests/faults/test_faults_repair.py::test_connecting_to_a_node_that_is_down",
    "tests/faults/test_faults_repair.py::test_nodes_whose_addresses_were_swapped",
    "tests/faults/test_faults_shard_moves.py::test_a_move_is_taken_back",
    "tests/faults/test_faults_shard_moves.py::test_a_shard_killed_at_any_point_of_a_hand_over",
    "tests/faults/test_faults_shard_moves.py::test_a_shard_killed_while_rows_are_read_ahead_is_waited_for[redis-taker",
    "tests/faults/test_faults_shard_moves.py::test_a_shard_killed_while_the_shards_of_a_sync_job",
    "tests/faults/test_faults_shard_moves.py::test_shard_0_killed_between_two_phases",
    "tests/faults/test_faults_shard_moves.py::test_what_was_on_its_way",
    "tests/faults/test_faults_shards.py::test_a_shard_killed_at_any_point",  # test_shard_crash.py kills shards under load
    "tests/faults/test_faults_shards.py::test_all_shards_may_be_restarted",
    "tests/faults/test_faults_shards.py::test_a_shard_or_trainer_with_another_configuration",
    "tests/faults/test_faults_shards.py::test_a_shard_without_pushes_that_looked_at_its_nodes_for_long",
    "tests/faults/test_faults_slabs.py",  # test_deleted_rows.py: rows that vanish one by one
    "tests/faults/test_faults_trainers.py::test_drop_goes_on",
    "tests/faults/test_faults_trainers.py::test_wait_holds_the_step",
    "tests/integration/test_drop_table.py::test_a_table_in_buckets_goes_bucket_by_bucket_and_not_row_by_row[compact",
    "tests/integration/test_drop_table.py::test_row_logs_and_checkpoints",
    "tests/integration/test_lost_journal_end.py::test_a_journal_that_lost_its_end_is_refused_by_name_and_no_row_goes_backwards[redis-remove",
    "tests/integration/test_lost_journal_end.py::test_a_shard_that_cannot_tell",
    "tests/integration/test_lost_journal_end.py::test_an_entry_that_a_crash_cut_off",
    "tests/integration/test_lost_journal_end.py::test_rows_that_only_the_lost_batches_made",
    "tests/integration/test_moves.py::test_a_node_joins_and_another_leaves_while_rows_are_pushed_and_pulled[memcached-True",
    "tests/integration/test_moves_of_sync_jobs.py",
    "tests/integration/test_node_moves.py::test_a_client_that_fails_at_once",
    "tests/integration/test_node_moves.py::test_addresses_that_lead_elsewhere",
    "tests/integration/test_repair.py::test_a_repair_names_every_shard",
    "tests/integration/test_repair.py::test_a_node_restarted_from_a_snapshot_older",
    "tests/integration/test_save_load.py::test_the_commands",
    "tests/integration/test_shard_crash.py::test_a_push_in_many_parts",
    "tests/integration/test_shard_crash.py::test_a_shard_that_starts_on_a_full_disk",
    "tests/integration/test_shard_moves.py::test_a_node_that_loses_its_rows",
    "tests/integration/test_tables_while_shards_move.py::test_a_trainer_that_slept",
    "tests/integration/test_tables_while_shards_move.py::test_no_slots_move",
    "tests/integration/test_trainer_restart.py::test_a_stopped_trainer_cannot_push_into_rows_that_its_successor_has_loaded[async",
    "tests/integration/test_trainer_restart.py::test_what_a_stopped_trainer_sends_after_its_successor_came_is_not_applied[async",
    # What a release takes of another one's is said by the rest of tests/upgrade.
    "tests/upgrade/test_refusals.py::test_the_way_that_a_refusal_gives",
    # Users, passwords and certificates that change while a cluster works.
    "tests/integration/test_tls.py::test_a_token_opens",
    "tests/integration/test_tls.py::test_certificates_are_renewed",
    "tests/integration/test_redis_users.py",
    "tests/integration/test_renewal.py",
    # Servers that lie at any byte, and bytes of any kind: tests/unit/test_wire_fuzz.py says it of the parsers; CI fuzzes for five minutes.
    "tests/fuzz",
    "tests/integration/test_hostile_servers.py",
    # Searches of further beginnings, and of protocols that are known to be wrong.
    "tests/models/test_shard_move.py::test_a_move_that_is_not_aborted",
    "tests/models/test_shard_move.py::test_the_search_finds",
    "tests/models/test_shard_move.py::test_whatever_comes_in_between_each_push_is_taken_once_and_the_move_can_end[a lost node",
    "tests/models/test_shard_steps.py::test_at_the_flip_all_have_had_the_same_steps_and_training_can_go_on[two trainers, ",
    "tests/models/test_shard_steps.py::test_at_the_flip_all_have_had_the_same_steps_and_training_can_go_on[two steps, ",
    "tests/models/test_shard_steps.py::test_the_search_finds",
    "tests/models/test_slot_move.py::test_the_search_finds",
    "tests/models/test_slot_move.py::test_whatever_comes_in_between_reads_are_right_and_the_move_can_end[a lost node",
    "tests/models/test_slot_move.py::test_whatever_comes_in_between_reads_are_right_and_the_move_can_end[two batches",
    "tests/test_running.py",
)
"""The beginnings of tests' ids: those that take longest for what others promise already."""


def one_of(first: object, *others: object) -> Sequence[object]:
    """Return parameters of a test: the first for every run, the others with the marker `full`.

    For tests of a whole cluster that say the same on each storage kind. What differs between kinds, the store contract tests on all.
    """
    return [first, *(pytest.param(other, marks=pytest.mark.full) for other in others)]


def examples(n: int) -> int:
    """Return how many examples Hypothesis shall try: n, and fewer in the profile `quick`. Where nothing says so, n is 100."""
    return n * hypothesis.settings.default.max_examples // 100  # type: ignore[union-attr]
