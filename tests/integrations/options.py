"""What becomes of each option of transformers' and TRL's configurations under `Zero3Mixin`. docs/integrations.md shows this table."""

from __future__ import annotations

from typing import Any, NamedTuple

from accelerate.parallelism_config import ParallelismConfig

CONFIGS = ("SFTConfig", "DPOConfig", "GRPOConfig", "RewardConfig", "KTOConfig", "RLOOConfig")  # of trl, beside TrainingArguments


class Try(NamedTuple):
    """A training with these options. Two ranks log what they log under DistributedDataParallel."""

    trainer: str
    options: dict[str, Any]
    plain: dict[str, Any] | None = None  # the options of the training that it is compared with, if it is not the same
    rtol: float = 2e-4


class Option(NamedTuple):
    why: str
    shown: tuple[Try, ...] | str  # or the test that shows it


class Refusal(NamedTuple):
    why: str
    shown: Any  # a value that is refused, or the test that shows it


_REFERENCE = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.2}
# several options are tried in one training
_ADAM = Try("Trainer", {"adam_beta1": 0.5, "adam_beta2": 0.7, "adam_epsilon": 0.1, "weight_decay": 0.5})
_WATCHED = Try("Trainer", {"optim": "adamw_torch_fused", "debug": "underflow_overflow", "skip_memory_metrics": False, "max_grad_norm": 0.0})
_SGD = Try(
    "Trainer",
    {
        "optim": "sgd",
        "optim_args": "momentum=0.9",
        "max_grad_norm": 0.1,
        "gradient_accumulation_steps": 3,
        "average_tokens_across_devices": False,
    },
)
_REENTRANT = Try("Trainer", {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}})
_EVERY = Try(
    "Trainer", {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False, "every_n_layers": 2}}
)
_COMPILED = Try("Trainer", {"torch_compile": True, "torch_compile_backend": "eager"}, {})
_FOLLOWING = Try("dpo", _REFERENCE), Try("kto", _REFERENCE), Try("grpo", _REFERENCE | {"by path": True, "beta": 0.1})
_CHECKPOINTS = "test_trainer_checkpoints.py::test_a_checkpoint_is_resumed_on_other_numbers_of_ranks"
_VLLM = "test_engines.py::test_vllm_is_synchronised_by_names_and_bits_of_the_files"
_BATCHING = "test_engines.py::test_trl_generates_by_continuous_batching"
_AHEAD = "test_trl.py::test_the_reference_is_computed_in_the_constructor"

RIGHT: dict[str, Option] = {
    "optim": Option(
        "the class is tried on small tensors, and gets flat chunks, aligned parts (8-bit and 4-bit ones) or whole parameters (Adafactor)",
        (_ADAM, _WATCHED, _SGD, *(Try("Trainer", {"optim": kind}) for kind in ("adagrad", "rmsprop"))),
    ),
    "optim_args": Option("given to the optimizer", (_SGD,)),
    "adam_beta1": Option("given to the optimizer", (_ADAM,)),
    "adam_beta2": Option("given to the optimizer", (_ADAM,)),
    "adam_epsilon": Option("given to the optimizer", (_ADAM,)),
    "weight_decay": Option("by the parameters' own names, as the Trainer chooses them", (_ADAM,)),
    "max_grad_norm": Option("by the one norm over all ranks", (_WATCHED, _SGD)),
    "gradient_accumulation_steps": Option("every micro-batch is reduced", (_SGD,)),
    "auto_find_batch_size": Option(
        "`zero3.BatchFinder`. Of TRL's trainers SFTTrainer's alone: rows of the others' batches belong together, and it is refused",
        "test_trainer_batches.py::test_a_trainer_whose_batch_does_not_fit_gives_what_it_gives_under_ddp",
    ),
    "average_tokens_across_devices": Option("as under DDP", (_SGD,)),
    "bf16": Option(
        "a `ShardingPolicy`: bf16 to gather and compute, float32 masters",
        "test_trainer_edges.py::test_bf16_computes_in_bf16_over_fp32_masters",
    ),
    "fp16": Option(
        "a `ShardingPolicy`, and zero3's GradScaler. Refused on the CPU",
        "test_accelerator.py::test_fp16_scales_losses_over_fp32_masters_and_skips_steps_together",
    ),
    "activation_checkpointing": Option("both kinds", (_EVERY,)),
    "activation_checkpointing_kwargs": Option("both kinds", (_EVERY,)),
    "gradient_checkpointing": Option("the older name", (_REENTRANT,)),
    "gradient_checkpointing_kwargs": Option("the older name", (_REENTRANT,)),
    "torch_compile": Option("graphs end where layers are fetched", (_COMPILED,)),
    "torch_compile_backend": Option("given to torch.compile", (_COMPILED,)),
    "neftune_noise_alpha": Option("its hook is on the embeddings", (Try("Trainer", {"neftune_noise_alpha": 5.0}),)),
    "accelerator_config": Option(
        "`gradient_accumulation_kwargs={'sync_each_batch': False}` keeps whole gradients until the last micro-batch",
        (
            Try("Trainer", {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": False}}}),
            Try("Trainer", {"accelerator_config": {"split_batches": True}}),
        ),
    ),
    "debug": Option("hooks read weights while their layer computes", (_WATCHED,)),
    "skip_memory_metrics": Option("counts this process", (_WATCHED,)),
    "save_strategy": Option("all ranks write one checkpoint", _CHECKPOINTS),
    "resume_from_checkpoint": Option("on any number of ranks", _CHECKPOINTS),
    "save_only_model": Option(
        "Hugging Face files alone", "test_trainer_checkpoints.py::test_weights_without_optimizer_state_are_not_resumed_in_silence"
    ),
    "load_best_model_at_end": Option("every rank reads its part", "test_trainer.py::test_a_trainer_gives_what_it_gives_under_ddp"),
    "model_init_kwargs": Option(
        "every rank reads the model that a path names, and shards it",
        (Try("sft", {"by path": True, "model_init_kwargs": {"dtype": "float32"}}),),
    ),
    "chat_template_path": Option(
        "a tokenizer's directory: its words are added before the model is sharded",
        (Try("sft", {"chat_template_path": "tokenizer"}), Try("reward", {"chat_template_path": "tokenizer"})),
    ),
    "loss_type": Option(
        "also those that read the weight of the output head",
        tuple(Try("sft", {"loss_type": kind}) for kind in ("dft", "chunked_nll")),
    ),
    "activation_offloading": Option(
        "`zero3.offload_activations` in its place, which leaves gathered weights where they are",
        tuple(Try(trainer, {"activation_offloading": True}, {}) for trainer in ("sft", "dpo", "kto", "reward")),
    ),
    "precompute_ref_log_probs": Option("the reference is sharded before", _AHEAD),
    "precompute_ref_batch_size": Option("the reference is sharded before", _AHEAD),
    "sync_ref_model": Option("chunk by chunk", _FOLLOWING),
    "ref_model_mixup_alpha": Option("chunk by chunk", _FOLLOWING),
    "ref_model_sync_steps": Option("chunk by chunk", _FOLLOWING),
    "beta": Option(
        "the reference that it needs is sharded like the model",
        (_FOLLOWING[-1], Try("rloo", {"by path": True, "beta": 0.1, "lora": False})),
    ),
    "num_iterations": Option("completions are used again", (Try("grpo", {"num_iterations": 2}),)),
    "cast_lm_head_to_fp32": Option(
        "the head has a chunk of its own dtype",
        (Try("grpo", {"cast_lm_head_to_fp32": True, "by path": True, "dtype": "bfloat16"}, rtol=2e-3),),
    ),
    "use_vllm": Option("against a stand-in: names and bits are those of `save_pretrained`, with adapters of `save_merged`", _VLLM),
    "vllm_mode": Option("server, colocate", _VLLM),
    "vllm_enable_sleep_mode": Option("the model is parked while the engine generates", _VLLM),
    "use_transformers_continuous_batching": Option("each rank holds the whole model meanwhile", _BATCHING),
    "use_transformers_paged": Option("the older name of it", _BATCHING),
    "transformers_continuous_batching_config": Option("as it is", _BATCHING),
    "cache_implementation": Option(
        "each rank has its own keys and values. `paged` is continuous batching",
        (Try("grpo", {"cache_implementation": "static"}),),
    ),
}
REFUSED: dict[str, Refusal] = {
    "optim": Refusal(
        "GaLore, APOLLO, LOMO and layerwise classes: they divide the unsharded model's parameters themselves",
        "test_trainer_optimizers.py::test_what_divides_parameters_itself_is_refused_by_name",
    ),
    "fp16": Refusal("on the CPU", "test_trainer_edges.py::test_fp16_on_a_device_without_it_and_the_stock_trainer_are_refused_by_name"),
    "bf16_full_eval": Refusal("it would convert the masters", True),
    "fp16_full_eval": Refusal("it would convert the masters", True),
    "fsdp": Refusal("zero3 shards the model itself", [True]),
    "deepspeed": Refusal("zero3 shards the model itself", {"zero_optimization": {"stage": 3}}),
    "parallelism_config": Refusal("other ways to shard a model", ParallelismConfig()),
    "use_liger_kernel": Refusal("it gives modules other forwards when training begins", True),
    "enable_jit_checkpoint": Refusal("each rank would save when its own signal comes", True),
    "save_on_each_node": Refusal("all ranks write one checkpoint, where all of them see it", True),
}
NO_MATTER: dict[str, str] = {
    "which rows a rank gets, and in which form": "per_device_train_batch_size per_device_eval_batch_size dataloader_drop_last "
    "dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor "
    "dataloader_multiprocessing_context dataloader_in_order remove_unused_columns label_names train_sampling_strategy "
    "length_column_name ignore_data_skip dataset_text_field dataset_kwargs dataset_num_proc eos_token pad_token max_length truncation_mode "
    "shuffle_dataset packing packing_strategy padding_free pad_to_multiple_of eval_packing completion_only_loss assistant_only_loss "
    "chat_template_kwargs generation_batch_size steps_per_generation num_generations num_generations_eval trust_remote_code",
    "how long, and with which rates": "num_train_epochs max_steps learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps "
    "full_determinism seed data_seed",
    "terms of the loss, after the model's forward": "label_smoothing_factor router_aux_loss_coef disable_dropout loss_weights "
    "ld_alpha f_divergence_type f_alpha_divergence_coef label_smoothing use_weighting discopop_tau epsilon delta epsilon_high "
    "sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg importance_sampling_level "
    "reward_weights multi_objective_aggregation scale_rewards mask_truncated_completions top_entropy_quantile entropy_coef "
    "use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target off_policy_mask_threshold "
    "use_bias_correction_kl normalize_advantages reward_clip_range center_rewards_coefficient desirable_weight undesirable_weight",
    "what `generate` draws, on each rank by itself": "max_completion_length temperature top_p top_k min_p generation_kwargs "
    "repetition_penalty max_tool_calling_iterations use_cache",
    "settings of vLLM, and corrections of its answers": "vllm_model_impl vllm_structured_outputs_regex vllm_server_base_url "
    "vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization vllm_max_model_length "
    "vllm_tensor_parallel_size vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_clip_max "
    "vllm_importance_sampling_clip_min vllm_importance_sampling_cap",
    "for what is refused": "liger_kernel_config optim_target_modules fsdp_config ds3_gather_for_generation",
    "for DDP, which is not there": "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph",
    "how ranks find each other, and their devices, before the model is sharded": "ddp_backend ddp_timeout local_rank use_cpu",
    "how kernels compute, and the memory that they leave behind": "tf32 torch_compile_mode torch_empty_cache_steps",
    "what is logged": "logging_strategy logging_steps logging_first_step log_on_each_node logging_nan_inf_filter "
    "include_num_input_tokens_seen log_level log_level_replica disable_tqdm report_to run_name project trackio_space_id trackio_bucket_id "
    "trackio_static_space_id log_completions log_multimodal num_completions_to_print log_unique_prompts log_completions_hub_repo",
    "when, and over what, metrics are computed": "eval_strategy eval_steps eval_delay prediction_loss_only eval_on_start "
    "eval_do_concat_batches eval_use_gather_object eval_accumulation_steps include_for_metrics batch_eval_metrics metric_for_best_model "
    "greater_is_better do_train do_eval do_predict",
    "when checkpoints are written, and where they go": "output_dir save_steps save_total_limit push_to_hub hub_token hub_private_repo "
    "hub_model_id hub_strategy hub_always_push hub_revision restore_callback_states_from_checkpoint",
}


def lines() -> list[str]:
    """The table, as docs/integrations.md has it."""
    rows = [(option, "right", about.why) for option, about in RIGHT.items()] + [(o, "refused", about.why) for o, about in REFUSED.items()]
    table = ["| option | | |", "|---|---|---|", *(f"| `{option}` | {verdict} | {why} |" for option, verdict, why in sorted(rows))]
    listed = [f"| {about} | {', '.join(f'`{option}`' for option in sorted(options.split()))} |" for about, options in NO_MATTER.items()]
    return [*table, "", "These options do not touch sharding:", "", "| about | options |", "|---|---|", *listed]
