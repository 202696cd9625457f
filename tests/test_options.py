"""No option without an effect: for each that users may give, the test that shows its effect. Reads sources; starts nothing.

A new option fails here until a test shows its effect and is named. The names are checked: a renamed test must be renamed here, too.
"""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

TABLE = "tests/integration/test_table.py"
POLICIES = "tests/integration/test_table_policies.py"
COMPACT = "tests/integration/test_compact_tables.py"
FAILURES = "tests/integration/test_table_failures.py"
DISTRIBUTE = "tests/torch/test_distribute.py"
LOCAL = "tests/integration/test_local_cluster.py"
IMPORT = "tests/integration/test_import.py"
SAVES = "tests/integration/test_save_load.py"
LOADED = "tests/unit/test_checkpoint_load.py"
PREPARE = "tests/torch/test_prepare.py"
CONSISTENCY = "tests/torch/test_prefetch_consistency.py"
STORES = "tests/integration/test_stores.py"
KERAS = "tests/keras_bridge"
JAX = "tests/jax_bridge/test_distribute_jax.py"
TENSORFLOW = "tests/tensorflow_bridge/test_distribute_tensorflow.py"
FEATURES = f"{KERAS}/test_distributed_embedding.py"
TRAINERS = "tests/faults/test_faults_trainers.py"
OF_A_TABLE = f"{DISTRIBUTE}:test_options_reach_the_tables"
SAVED = f"{SAVES}:test_a_save_under_load_is_one_cut_per_shard_and_holds_all_that_was_acknowledged"
STEP = f"{FAILURES}:test_a_sync_step_applies_what_all_trainers_pushed_at_once"
HANDED_ON = f"{LOCAL}:test_a_local_cluster_hands_every_option_on"
SHOWN = "tests/integration/test_cli.py:test_status_shows_every_node_and_shard"
TLS = "tests/integration/test_tls.py"
IN_THE_CLEAR = f"{TLS}:test_plain_text_beyond_this_machine_takes_a_word_in_the_file"
SCRAPED = "tests/integration/test_metrics.py:test_every_shard_serves_its_figures_on_a_port_of_its_own"

# By function, or by class of which each field is a key of kvemb.yaml: its options, and where their effect is shown.
INDEX_ON_DISK = "tests/integration/test_index_on_disk.py:test_rows_that_do_not_fit_into_the_memory_for_indexes_are_known_by_the_row_log"

SERVING = "tests/integration/test_serving.py"
DENSE = "tests/torch/test_dense_part.py"
SERVED = f"{DENSE}:test_a_view_of_rows_and_dense_part_computes_what_the_trainers_model_computed"

SHOWN_BY = {
    "kvemb/serve/serving_client.py:connect": {
        "source": f"{SERVING}:test_without_a_shard_rows_are_served_and_as_old_as_they_may_be",
        "cache_mb": f"{SERVING}:test_without_a_shard_rows_are_served_and_as_old_as_they_may_be",
        "filter_mb": f"{SERVING}:test_ids_that_have_no_row_are_not_asked_for_and_new_ones_are_seen",
        "max_age_ms": f"{SERVING}:test_without_a_shard_rows_are_served_and_as_old_as_they_may_be",
        "timeout_ms": f"{SERVING}:test_lost_nodes_give_a_degraded_answer_and_the_right_one_when_they_are_back",
        "degraded": f"{SERVING}:test_lost_nodes_give_a_degraded_answer_and_the_right_one_when_they_are_back",
        "unknown": f"{SERVING}:test_each_table_has_a_rule_for_ids_without_a_row",
    },
    "kvemb/serve/served_model.py:Model.__init__": {
        "client": SERVED,
        "dense": f"{DENSE}:test_ragged_bags_with_weights_are_pooled_as_the_trainers_model_does",
        "inputs": f"{DENSE}:test_what_cannot_be_exported_or_run_is_refused_by_name",
    },
    "trainer/torch/export/dense_part.py:export_dense": {"model": SERVED, "inputs": SERVED, "file": SERVED},
    "kvemb/api/connector.py:connect": {
        "source": "tests/unit/test_config.py:test_a_mapping_is_read_as_a_file_would_be",
        "read_only": f"{TABLE}:test_read_only_pulls_and_refuses_the_rest",
        "trainer": "tests/integration/test_trainer_restart.py:test_what_a_stopped_trainer_sends_after_its_successor_came_is_not_applied",
        "timeout_s": f"{FAILURES}:test_connecting_waits_as_long_as_it_was_told",
        "metrics_port": "tests/integration/test_metrics.py:test_a_trainer_serves_the_times_of_its_pulls_by_table_until_it_is_closed",
    },
    "kvemb/api/cluster.py:Cluster.create_table": {
        "name": "tests/integration/test_table_names.py:test_any_printable_name_is_a_tables",
        "dim": f"{TABLE}:test_several_tables_travel_together",
        "optimizer": f"{TABLE}:test_opening_with_another_learning_rate_uses_it",
        "initializer": f"{TABLE}:test_a_pull_of_unseen_ids_is_the_initializer_and_creates_nothing",
        "dtype": f"{TABLE}:test_a_pull_of_unseen_ids_is_the_initializer_and_creates_nothing",
        "id_dtype": f"{TABLE}:test_negative_ids_are_refused_where_the_dtype_forbids",
        "seed": f"{TABLE}:test_a_pull_of_unseen_ids_is_the_initializer_and_creates_nothing",
        "reduce": STEP,
        "num_ids": "tests/integration/test_table_pages.py:test_ids_outside_are_refused_by_every_verb_and_nothing_is_sent",
        "expected_rows": f"{TABLE}:test_a_table_of_many_expected_rows_has_as_many_buckets_for_its_life",
        "layout": f"{COMPACT}:test_the_buckets_of_a_compact_table_are_compact_strings_and_those_of_others_are_not",
        "frozen": "tests/integration/test_opaque_rows.py:test_gradients_are_refused_by_client_and_shard_and_state_is_none",
        "admission": f"{POLICIES}:test_an_id_gets_its_row_with_its_third_gradient_and_the_ack_says_what_was_held_back",
        "eviction": f"{POLICIES}:test_policies_are_the_tables_own_and_every_client_sees_them",
        "exist_ok": f"{TABLE}:test_another_identity_is_refused_and_both_are_shown",
        "start_over": "tests/integration/test_drop_table.py:test_start_over_drops_what_there_is_and_creates_anew",
    },
    "kvemb/foreign/table_files.py:TableFiles.import_rows": {
        "table": f"{IMPORT}:test_row_i_of_an_npy_is_id_i",
        "source": f"{IMPORT}:test_row_i_of_an_npy_is_id_i",
        "ids": f"{IMPORT}:test_ids_and_state_of_npy_are_files_of_their_own",
        "weights": f"{IMPORT}:test_parquet_of_lists_is_read",
        "state": f"{IMPORT}:test_ids_and_state_of_npy_are_files_of_their_own",
        "format": f"{IMPORT}:test_the_command_imports_and_resumes",
        "resume": f"{IMPORT}:test_an_import_that_was_broken_off_goes_on_and_ends_with_the_same_rows",
        "timeout_s": f"{IMPORT}:test_each_block_has_the_time_that_the_caller_gives",
        "progress": f"{IMPORT}:test_an_import_that_was_broken_off_goes_on_and_ends_with_the_same_rows",
    },
    "kvemb/foreign/table_files.py:TableFiles.export_rows": {
        "table": f"{IMPORT}:test_an_exported_table_comes_back_bit_for_bit",
        "url": f"{IMPORT}:test_an_exported_table_comes_back_bit_for_bit",
        "format": f"{IMPORT}:test_a_dense_table_is_one_npy_and_rows_that_do_not_exist_are_as_pulls_give_them",
        "ids": f"{IMPORT}:test_an_exported_table_comes_back_bit_for_bit",
        "dtype": f"{IMPORT}:test_weights_written_in_fewer_bits_come_back_within_the_stated_error",
        "progress": f"{IMPORT}:test_an_exported_table_comes_back_bit_for_bit",
    },
    "kvemb/checkpoint/checkpoint_verbs.py:Checkpoints.save": {
        "url": SAVED,
        "base": SAVED,
        "weights_only": f"{SAVES}:test_a_checkpoint_goes_to_another_number_of_shards_and_another_storage",
        "extra": SAVED,
        "resume": f"{SAVES}:test_a_save_whose_shard_was_killed_can_be_resumed",
        "timeout_s": "tests/unit/test_checkpoint_save.py:test_shards_and_caller_have_the_same_time_for_the_cut",
        "progress": SAVED,
    },
    "kvemb/checkpoint/checkpoint_verbs.py:Checkpoints.load": {
        "url": f"{SAVES}:test_a_load_brings_everything_back_while_trainers_wait",
        "tables": f"{SAVES}:test_a_load_asks_before_rows_go_and_takes_one_table_alone",
        "stall_timeout_s": f"{LOADED}:test_a_load_of_which_no_shard_comes_any_further_is_watched_no_longer_than_asked_for",
        "progress": f"{SAVES}:test_a_shard_killed_while_it_loads_goes_on_when_it_is_started",
    },
    "trainer/torch/elastic_ranks.py:connect_rank": {
        "source": "tests/torch/test_elastic.py:test_a_rank_fences_every_place_of_its_job_and_no_other_job",
        "places": "tests/torch/test_elastic.py:test_a_rank_fences_every_place_of_its_job_and_no_other_job",
        "job": "tests/torch/test_elastic.py:test_a_rank_fences_every_place_of_its_job_and_no_other_job",
    },
    "trainer/torch/loaders/prepared_loader.py:prepare": {
        "model": f"{PREPARE}:test_named_features_are_looked_up_ahead_and_nothing_is_pulled_in_forward",
        "loader": f"{PREPARE}:test_named_features_are_looked_up_ahead_and_nothing_is_pulled_in_forward",
        "features": f"{PREPARE}:test_parts_of_a_batch_are_named_in_several_ways",
        "exchange": "tests/torch/test_rank_exchange.py:test_each_row_of_a_step_is_read_once_and_pushed_once",
    },
    "trainer/bridge/batches_ahead.py:AheadOptions": {
        "consistency": f"{CONSISTENCY}:test_exact_has_the_losses_of_training_without_prefetch_bit_for_bit",
        "k": f"{CONSISTENCY}:test_bounded_never_lacks_more_than_k_batches",
        "threads_num": f"{PREPARE}:test_as_many_threads_pull_as_was_said",
        "capacity": f"{PREPARE}:test_rows_are_as_old_as_capacity_says",
        "executor": f"{PREPARE}:test_a_pool_of_the_callers_own_runs_the_pulls_and_stays_open",
        "report": "tests/torch/test_step_report.py:test_a_prepared_loader_puts_its_report_in_force_while_it_is_iterated",
    },
    "trainer/torch/export/materialize.py:materialize": {
        "model": "tests/torch/test_materialize.py:test_all_rows_of_a_dense_table_become_torchs_own_modules",
        "ids": "tests/torch/test_materialize.py:test_chosen_ids_are_found_and_others_are_zeros",
        "max_bytes": "tests/torch/test_materialize.py:test_the_rows_of_all_id_sets_of_a_table_count",
    },
    "trainer/torch/conversion/distribute.py:distribute": {
        "model": f"{DISTRIBUTE}:test_a_table_begins_with_the_modules_own_weights",
        "cluster": f"{DISTRIBUTE}:test_a_table_begins_with_the_modules_own_weights",
        "optimizer": f"{DISTRIBUTE}:test_a_rule_for_all_tables_goes_with_a_sparse_optimizer",
        "carry_weights": f"{DISTRIBUTE}:test_carried_weights_are_the_first_rows_in_chunks",
        "max_unapplied": f"{DISTRIBUTE}:test_how_many_pushes_may_be_on_their_way_is_handed_on",
    },
    "trainer/bridge/convert_model.py:DistributeOptions": {
        "min_rows": f"{DISTRIBUTE}:test_a_table_begins_with_the_modules_own_weights",
        "names": f"{DISTRIBUTE}:test_an_embedding_that_is_named_stays_as_it_is",
        "prefix": f"{DISTRIBUTE}:test_models_with_the_same_paths_share_rows_and_are_told_once_or_have_a_prefix",
        "leave": f"{DISTRIBUTE}:test_an_embedding_that_is_named_stays_as_it_is",
        "initializer": f"{DISTRIBUTE}:test_an_initializer_that_is_given_draws_the_rows_and_padding_is_zeros",
        "dtype": OF_A_TABLE,
        "seed": OF_A_TABLE,
        "reduce": OF_A_TABLE,
        "quiet": f"{DISTRIBUTE}:test_it_says_what_it_did",
    },
    "trainer/keras/distributing/distribute_keras.py:distribute": {
        "model": f"{KERAS}/test_keras_fit.py:test_fit_evaluate_and_predict_are_those_of_the_plain_model",
        "cluster": f"{KERAS}/test_keras_fit.py:test_fit_evaluate_and_predict_are_those_of_the_plain_model",
        "optimizer": f"{KERAS}/test_keras_rules.py:test_a_rule_for_all_tables_keeps_its_own_rate",
        "features": f"{KERAS}/test_keras_uses.py:test_a_model_that_cannot_be_followed_is_told_what_feeds_its_layers",
        "max_unapplied": f"{KERAS}/test_keras_options.py:test_options_reach_the_tables",
    },
    "trainer/jax/distribute_jax.py:distribute": {
        "model": f"{JAX}:test_losses_rows_and_parameters_are_those_of_the_plain_program",
        "cluster": f"{JAX}:test_losses_rows_and_parameters_are_those_of_the_plain_program",
        "optimizer": f"{JAX}:test_losses_rows_and_parameters_are_those_of_the_plain_program",
    },
    "trainer/tensorflow/distribute_tensorflow.py:distribute": {
        "model": f"{TENSORFLOW}:test_rows_weights_and_losses_are_those_of_the_same_program_without_the_line",
        "cluster": f"{TENSORFLOW}:test_rows_weights_and_losses_are_those_of_the_same_program_without_the_line",
        "optimizer": f"{TENSORFLOW}:test_rows_weights_and_losses_are_those_of_the_same_program_without_the_line",
        "max_unapplied": f"{TENSORFLOW}:test_options_reach_the_tables",
    },
    "trainer/tensorflow/distribute_tensorflow.py:materialize": {
        "model": f"{TENSORFLOW}:test_a_saved_model_is_made_of_a_plain_copy",
        "max_bytes": f"{TENSORFLOW}:test_a_saved_model_is_made_of_a_plain_copy",
    },
    "trainer/keras/distributing/distribute_keras.py:materialize": {
        "model": f"{KERAS}/test_keras_uses.py:test_a_copy_of_plain_layers_predicts_the_same_without_a_cluster",
        "max_bytes": f"{KERAS}/test_keras_uses.py:test_a_copy_beyond_max_bytes_is_refused",
    },
    "trainer/keras/layers/row_embedding.py:RowEmbedding.__init__": {
        "table": f"{KERAS}/test_keras_uses.py:test_a_layer_over_a_table_combines_bags",
        "combiner": f"{KERAS}/test_keras_uses.py:test_a_layer_over_a_table_combines_bags",
        "mask_zero": f"{KERAS}/test_keras_uses.py:test_a_layer_over_a_table_combines_bags",
        "output_dim": f"{KERAS}/test_keras_uses.py:test_a_saved_model_has_no_rows_and_goes_on_with_its_tables",
        "input_dim": f"{KERAS}/test_keras_uses.py:test_a_saved_model_has_no_rows_and_goes_on_with_its_tables",
    },
    "trainer/keras/layers/feature_configs.py:TableConfig": {
        "name": f"{FEATURES}:test_nested_features_with_a_shared_table_learn_as_plain_embeddings",
        "vocabulary_size": f"{FEATURES}:test_what_means_nothing_here_is_refused_by_name",
        "embedding_dim": f"{FEATURES}:test_nested_features_with_a_shared_table_learn_as_plain_embeddings",
        "initializer": f"{FEATURES}:test_a_table_that_the_cluster_cannot_have_is_refused_before_anything_is_made",
        "optimizer": f"{FEATURES}:test_each_table_has_its_own_optimizer_and_follows_its_schedule",
        "combiner": f"{FEATURES}:test_bags_are_combined_with_weights_and_ragged_ones_are_padded",
        "placement": f"{FEATURES}:test_what_means_nothing_here_is_refused_by_name",
        "max_ids_per_partition": f"{FEATURES}:test_what_means_nothing_here_is_refused_by_name",
        "max_unique_ids_per_partition": f"{FEATURES}:test_what_means_nothing_here_is_refused_by_name",
    },
    "trainer/keras/layers/feature_configs.py:FeatureConfig": {
        "name": f"{FEATURES}:test_nested_features_with_a_shared_table_learn_as_plain_embeddings",
        "table": f"{FEATURES}:test_nested_features_with_a_shared_table_learn_as_plain_embeddings",
        "input_shape": f"{FEATURES}:test_what_means_nothing_here_is_refused_by_name",
        "output_shape": f"{FEATURES}:test_what_means_nothing_here_is_refused_by_name",
    },
    "trainer/keras/layers/distributed_embedding.py:DistributedEmbedding.__init__": {
        "feature_configs": f"{FEATURES}:test_nested_features_with_a_shared_table_learn_as_plain_embeddings",
        "table_stacking": f"{FEATURES}:test_what_means_nothing_here_is_refused_by_name",
        "update_stats": f"{FEATURES}:test_what_means_nothing_here_is_refused_by_name",
    },
    "kvemb/local_cluster/launcher.py:LocalCluster.__init__": {
        "store": SHOWN,
        "nodes": SHOWN,
        "shards": SHOWN,
        "mode": STEP,
        "trainers": STEP,
        "memory_mb": f"{LOCAL}:test_servers_and_shards_have_the_memory_that_was_asked_for",
        "barrier_timeout_s": HANDED_ON,
        "cache_mb": f"{LOCAL}:test_servers_and_shards_have_the_memory_that_was_asked_for",
        "index_mb": INDEX_ON_DISK,
        "durability": HANDED_ON,
        "journal_max_mb": HANDED_ON,
        "metrics_port": SCRAPED,
    },
    "kvemb/local_cluster/launcher.py:local": dict.fromkeys(
        ("store", "nodes", "shards", "mode", "trainers", "memory_mb", "cache_mb", "durability", "journal_max_mb"), HANDED_ON
    ),
    "kvemb/config.py:Config": {
        "cluster": "tests/integration/test_paramserver.py:test_a_changed_name_of_the_cluster_is_refused_and_the_old_one_goes_on",
        "storage": SHOWN,
        "servers": SHOWN,
        "tables": "tests/integration/test_drop_table.py:test_the_command_drops_only_when_told_so_and_not_what_the_file_declares",
    },
    "kvemb/config.py:StorageConfig": {
        "kind": f"{STORES}:test_a_server_of_another_kind_is_no_hang",
        "nodes": SHOWN,
        "timeout_s": "tests/faults/test_faults_nodes.py:test_a_hung_node_costs_one_deadline_and_the_other_nodes_go_on_serving",
        "username": f"{STORES}:test_the_user_of_the_configuration_is_used",
        "password": f"{STORES}:test_the_password_of_the_configuration_is_used",
        "allow_row_loss": f"{STORES}:test_a_redis_that_may_evict_is_refused_unless_allowed",
        "on_lost_node": "tests/faults/test_faults_repair.py:test_a_pull_from_a_lost_node_waits_or_fails_as_configured",
        "tls": "tests/integration/test_stores_tls.py:_OverTls.test_a_stranger_is_refused_by_name",
        "insecure": IN_THE_CLEAR,
    },
    "kvemb/config.py:ServersConfig": {
        "shards": SHOWN,
        "mode": STEP,
        "trainers": STEP,
        "data_dir": "tests/unit/test_config.py:test_a_relative_data_dir_starts_at_the_folder_of_the_file",
        "barrier_timeout_s": f"{TRAINERS}:test_abort_ends_the_others_and_nothing_of_the_step_is_applied_where_it_was_not_whole",
        "on_lost_trainer": f"{TRAINERS}:test_drop_goes_on_without_the_trainer_also_over_a_restart_and_lets_it_in_again",
        "away_timeout_s": f"{FAILURES}:test_a_shard_may_be_away_for_as_long_as_kvemb_yaml_says",
        "cache_mb": f"{LOCAL}:test_servers_and_shards_have_the_memory_that_was_asked_for",
        "index_mb": INDEX_ON_DISK,
        "durability": "tests/unit/test_ps_start_options.py:test_a_shard_syncs_its_journal_unless_it_is_told_not_to",
        "journal_max_mb": "tests/faults/test_faults_archive.py:test_shards_killed_at_the_steps_of_flushes_go_on_where_they_were",
        "metrics_port": SCRAPED,
        "tls": f"{TLS}:test_a_certificate_that_is_not_good_is_refused_by_name",
        "insecure": IN_THE_CLEAR,
    },
    "kvemb/net/tls_config.py:TlsConfig": {
        "ca": f"{TLS}:test_a_trainer_refuses_a_shard_of_another_authority_and_plain_text_is_refused",
        "cert": f"{TLS}:test_a_trainer_with_its_certificate_trains_under_its_name_and_below_it",
        "key": f"{TLS}:test_a_trainer_with_its_certificate_trains_under_its_name_and_below_it",
        "token": "tests/unit/test_tls_config.py:test_a_token_of_the_environment_is_taken_and_never_shown",
        "token_file": f"{TLS}:test_a_token_opens_everything_and_no_other_word_does",
        "unset": "tests/integration/test_doctor_certificates.py:test_a_variable_that_is_not_set_is_named_where_a_certificate_is_asked_for",
    },
}


@cache
def defined(path: str) -> dict[str, ast.FunctionDef | ast.ClassDef]:
    """The functions and classes of a file, methods as `Class.method`."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    found = {node.name: node for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body if isinstance(node, kinds)}
    inner = {f"{of.name}.{node.name}": node for of in found.values() for node in of.body if isinstance(node, kinds)}
    return found | inner


def options(node: ast.FunctionDef | ast.ClassDef) -> set[str]:
    """The arguments of a function, or the fields of a class."""
    if isinstance(node, ast.ClassDef):
        return {one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)}
    return {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)} - {"self"}


def test_a_test_shows_the_effect_of_every_option() -> None:
    there = {where: options(defined(where.split(":")[0])[where.split(":")[1]]) for where in SHOWN_BY}
    assert there == {where: set(tests) for where, tests in SHOWN_BY.items()}


def test_the_tests_that_show_it_are_there() -> None:
    named = {test for tests in SHOWN_BY.values() for test in tests.values()}
    assert [test for test in named if test.split(":")[1] not in defined(test.split(":")[0])] == []
