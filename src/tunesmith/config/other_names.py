"""What other tools (transformers, peft, TRL, Unsloth, axolotl, LLaMA-Factory) call what is set here, or decided without
being asked: for the hint at a setting that there is not."""

from __future__ import annotations

_BY_OUR_NAMES = {
    "model": "base_model model_name model_name_or_path model_id pretrained_model_name_or_path",
    "method": "finetuning_type peft_type",
    "objective": "stage rl",
    "data": "dataset datasets dataset_name train train_data train_dataset train_file",
    "eval": "eval_data eval_dataset test test_datasets val valid validation",
    "held_out": "val_set_size val_size test_size",
    "train_on": "train_on_inputs train_on_prompt mask_history assistant_only_loss completion_only_loss",
    "new_tokens": "add_tokens added_tokens new_special_tokens add_special_tokens",
    "special_tokens": "split_special_tokens",
    "sequence_length": "max_length max_seq_length max_seq_len seq_len seq_length sequence_len context_length "
    "cutoff_len block_size model_max_length",
    "epochs": "num_epochs num_train_epochs",
    "steps": "max_steps train_steps",
    "learning_rate": "lr",
    "schedule": "lr_scheduler lr_scheduler_type scheduler",
    "warmup": "warmup_ratio warmup_steps",
    "optimizer": "optim use_galore use_apollo use_badam",
    "weight_decay": "wd",
    "max_grad_norm": "max_norm gradient_clipping grad_clip gradient_clip_val",
    "neftune_noise_alpha": "neftune_alpha noisy_embedding_alpha",
    "precision": "dtype torch_dtype bf16 fp16 fp8 mixed_precision pure_bf16",
    "quantization_aware": "qat",
    "seed": "random_state data_seed",
    "eval_every": "eval_steps eval_strategy evaluation_strategy evals_per_epoch",
    "stop_when": "early_stopping_patience",
    "save_every": "save_steps save_strategy saves_per_epoch",
    "keep": "save_total_limit",
    "output": "output_dir out_dir",
    "max_minutes": "max_time",
    "adapter": "adapter_name_or_path lora_model_dir",
    "lora.rank": "lora_r r lora_rank",
    "lora.alpha": "lora_alpha",
    "lora.dropout": "lora_dropout",
    "lora.targets": "target_modules lora_target lora_target_modules lora_target_linear",
    "lora.layers": "layers_to_transform peft_layers_to_transform",
    "lora.rank_stabilised": "use_rslora rslora peft_use_rslora rank_stabilized",
    "lora.dora": "use_dora peft_use_dora",
    "lora.b_rate": "loraplus_lr_ratio loraplus_lambda",
    "lora.init": "init_lora_weights peft_init_lora_weights pissa_init loftq_config",
    "preference.beta": "pref_beta dpo_beta",
    "preference.loss": "loss_type pref_loss",
    "preference.sft_weight": "pref_ftx rpo_alpha",
    "preference.margin": "simpo_gamma",
    "rollout.answers": "num_generations",
    "rollout.max_answer_tokens": "max_completion_length",
    "rewards": "reward_funcs",
    "data.0.path": "file files data_files",
    "data.0.format": "type",
    "rewards.0.kind": "type",
    "data.0.subset": "config",
    "data.0.limit": "max_samples",
}
SETTINGS: dict[str, list[str]] = {}
"""Their name -> our settings, by dotted keys; where a name stands for several, the part it is in says which."""
for _ours, _names in _BY_OUR_NAMES.items():
    for _theirs in _names.split():
        SETTINGS.setdefault(_theirs, []).append(_ours)

_BY_SENTENCES = {
    "`batch_tokens` says how many tokens a step has over all devices, and the plan cuts them into micro-batches": (
        "batch_size micro_batch_size train_batch_size global_batch_size gradient_accumulation_steps "
        "per_device_train_batch_size"
    ),
    "the plan decides it, from what the model, the data and this machine are; `tunesmith plan` says how and why": (
        "per_device_eval_batch_size eval_batch_size gradient_checkpointing use_gradient_checkpointing "
        "gradient_checkpointing_kwargs activation_offloading flash_attention flash_attn attn_implementation "
        "sdp_attention xformers_attention use_liger_kernel enable_liger_kernel liger_kernel torch_compile deepspeed "
        "fsdp fsdp_config tf32 device_map auto_find_batch_size dataloader_num_workers dataloader_pin_memory "
        "dataset_num_proc dataset_processes preprocessing_num_workers tensor_parallel_size context_parallel_size"
    ),
    "examples are packed wherever the model keeps packed documents apart, and padded where it does not": (
        "packing sample_packing eval_sample_packing neat_packing pad_to_sequence_len group_by_length padding_free"
    ),
    "`method: qlora` holds the base in 4 bits, and with `lora: {bits: 8}` in 8": (
        "load_in_4bit load_in_8bit quantization_bit bnb_4bit_quant_type bnb_4bit_compute_dtype "
        "bnb_4bit_use_double_quant quantization_config double_quantization"
    ),
    "adapters go on the embedding and the output head where `lora.targets` names them, `new_tokens` trains the rows of "
    "tokens that it adds, and `method: full` all weights": (
        "modules_to_save lora_modules_to_save additional_target train_embeddings"
    ),
    "peft's LoRA has it: `method: peft` with `peft: {peft_type: LORA, ...}` takes peft's own fields": (
        "rank_pattern alpha_pattern exclude_modules target_parameters trainable_token_indices layer_replication "
        "layers_pattern lora_bias bias use_qalora"
    ),
    "`tunesmith train --track` tells wandb, mlflow, tensorboard or trackio; events.jsonl of the run has every step": (
        "report_to logging_steps logging_dir run_name wandb_project wandb_entity mlflow_tracking_uri use_tensorboard"
    ),
    "`tunesmith train` continues what the folder `output` holds, if there is something": (
        "resume_from_checkpoint auto_resume_from_checkpoints overwrite_output_dir"
    ),
    "`tunesmith export --push OWNER/NAME` sends a result to the hub": "push_to_hub hub_model_id hub_strategy",
    "the model's own chat template is taken, or the file that `chat_template` names": "template chat_template_jinja",
}
SENTENCES = {theirs: sentence for sentence, names in _BY_SENTENCES.items() for theirs in names.split()}
"""Their name -> what is to be known of it, where no setting of ours stands for it."""
