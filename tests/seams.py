"""Seams: the names of other libraries that this package overrides, calls or reads.

A new release of TRL or transformers may move any of them. `tests/test_seams.py` looks up each name
and its parameters, so that such a release fails with the name of the seam, and not with a wrong
loss. The same test finds seams in the sources that are missing here.

    METHODS      methods of `SFTTrainer` that `PackedSFTTrainer` overrides, with their parameters
    FUNCTIONS    functions and methods that are called, with their parameters
    ATTRIBUTES   attributes that an object of another library holds, and the class that sets them
    NAMES        classes, constants and modules outside of the libraries' top-level names
    FORWARDS     names by which calls of a model are read and completed, and a class that takes them

Read in TRL 1.16, transformers 5.17 and 5.24, accelerate 1.12 and 1.15, datasets 4.8 and 5.2.
"""

METHODS = {
    # --- public ---
    "compute_loss": "self, model, inputs, return_outputs, num_items_in_batch",
    "compute_loss_context_manager": "self",
    "evaluate": "self, eval_dataset, ignore_keys, metric_key_prefix",
    "evaluation_loop": (
        "self, dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix"
    ),
    "log": "self, logs, start_time",
    "prediction_step": "self, model, inputs, prediction_loss_only, ignore_keys",
    "save_model": "self, output_dir, _internal_call",
    "set_initial_training_values": "self, args, dataloader",
    "train": "self, resume_from_checkpoint, trial, ignore_keys_for_eval",
    "training_step": "self, args, kwargs",
    # --- private ---
    "_get_dataloader": (
        "self, dataset, description, batch_size, sampler_fn, is_training, dataloader_key"
    ),
    "_get_train_sampler": "self, train_dataset",
    "_init_training_state": (
        "self, max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, "
        "trial"
    ),
    "_prepare_dataset": (
        "self, dataset, processing_class, args, packing, formatting_func, dataset_name"
    ),
    "_prepare_inputs": "self, inputs",
    "_run_epoch": (
        "self, model, epoch, train_dataloader, steps_in_epoch, num_update_steps_per_epoch, trial, "
        "ignore_keys_for_eval, start_time, resume_from_checkpoint, epochs_trained, "
        "steps_trained_in_current_epoch"
    ),
    "_save_checkpoint": "self, model, trial",
    "_track_num_input_tokens": "self, inputs",
}

FUNCTIONS = {
    "accelerate.utils.broadcast_object_list": "object_list, from_process",
    "accelerate.state.GradientState._set_sync_gradients": "self, sync_gradients",
    "transformers.Trainer._get_num_items_in_batch": "self, batch_samples, device",
    "transformers.Trainer._get_output_dir": "self, trial",
    "transformers.Trainer._push_from_checkpoint": "self, checkpoint_folder",
    "transformers.Trainer.get_batch_samples": "self, epoch_iterator, num_batches, device",
    "transformers.Trainer.get_cp_size": "self",
    "transformers.Trainer.get_sp_size": "self",
    "transformers.Trainer.get_tp_size": "self",
    "transformers.masking_utils.find_packed_sequence_indices": "position_ids",
    "transformers.integrations.neftune.neftune_post_forward_hook": "module, input, output",
    "transformers.models.mixtral.modeling_mixtral.load_balancing_loss_func": (
        "gate_logits, num_experts, top_k, attention_mask"
    ),
    "transformers.trainer_pt_utils.get_length_grouped_indices": (
        "lengths, batch_size, mega_batch_mult, generator"
    ),
    "transformers.trainer_utils.get_last_checkpoint": "folder",
    "transformers.trainer_utils.rotate_checkpoints": (
        "output_dir, save_total_limit, best_model_checkpoint, use_mtime, checkpoint_prefix"
    ),
    "transformers.utils.chat_template_utils._compile_jinja_template": "chat_template",
    "transformers.utils.chat_template_utils.render_jinja_template": (
        "conversations, tools, documents, chat_template, return_assistant_tokens_mask, "
        "continue_final_message, add_generation_prompt, kwargs"
    ),
    "trl.chat_template_utils.clone_chat_template": (
        "model, tokenizer, source_tokenizer_path, resize_to_multiple_of"
    ),
    "trl.chat_template_utils.get_training_chat_template": "processing_class, tokenizer",
    "trl.chat_template_utils.has_generation_markers": "chat_template",
    "trl.chat_template_utils.supports_tool_calling": "processing_class",
    "trl.data_utils.common_prefix_length": "ids, other_ids",
    "trl.data_utils.get_dataset_column_names": "dataset",
    "trl.data_utils.is_conversational": "example",
    "trl.data_utils.prepare_multimodal_messages": "messages, images",
    "trl.kernels.chunked_logprob._use_triton": "device",
    "trl.SFTTrainer._get_eval_sampler": "self, eval_dataset",
    "trl.SFTTrainer._reject_skip_prepare_without_labels": "self, datasets, data_collator",
    "trl.trainer.utils.add_fused_lm_head": "model, temperature, cast_lm_head_to_fp32, outputs",
    "trl.trainer.utils.global_then_local_main_first": "",
    "trl.trainer.utils.maybe_gather_lm_head_ctx": "params",
    "trl.trainer.utils.pad": "tensors, padding_value, padding_side, pad_to_multiple_of",
    "torch._C._current_graph_task_id": None,
    "torch._C._autograd._top_saved_tensors_default_hooks": None,
    "torch.nn.modules.module._global_forward_hooks_with_kwargs": None,
    "torch.ops.aten._flash_attention_backward": None,
    "torch.ops.aten._flash_attention_forward": None,
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu": None,
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward": None,
}

_BY_CLASS = {
    "trl.SFTTrainer": (
        "_formatting_func _metrics _tokenizer _total_train_tokens "
        "aux_loss_enabled router_aux_loss_coef completion_only_loss chat_template padding_free"
    ),
    "transformers.Trainer": (
        "_train_batch_size current_gradient_accumulation_steps label_smoother "
        "model_accepts_loss_kwargs"
    ),
    "transformers.Cache": "layer_class_to_replicate",
    "transformers.LlavaProcessor": "_get_num_multimodal_tokens",
    "transformers.ProcessorMixin": "_merge_kwargs _process_images",
    "accelerate.Accelerator": "_models",
    "datasets.IterableDataset": "_distributed _ex_iterable",
    "datasets.Dataset": "_fingerprint _indices",
    "datasets.iterable_dataset.FormattedExamplesIterable": "features",
    "transformers.PreTrainedModel": "_can_set_attn_implementation",
    "transformers.PreTrainedConfig": "_attn_implementation_internal",
}
ATTRIBUTES = {name: owner for owner, names in _BY_CLASS.items() for name in names.split()}

_BY_MODULE = {
    "accelerate.data_loader": "DataLoaderShard",
    "accelerate.logging": "get_logger",
    "datasets.exceptions": "DatasetGenerationError",
    "transformers.cache_utils": "DynamicLayer",
    "transformers.masking_utils": "ALL_MASK_ATTENTION_FUNCTIONS",
    "transformers.modeling_utils": "ALL_ATTENTION_FUNCTIONS",
    "transformers.models.auto.modeling_auto": (
        "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"
    ),
    "transformers.trainer_pt_utils": "BatchRebalanceSampler",
    "transformers.trainer_utils": "PREFIX_CHECKPOINT_DIR",
    "transformers.utils": "import_utils is_torch_xla_available logging",
    "trl.trainer.sft_trainer": (
        "DataCollatorForLanguageModeling DataCollatorForVisionLanguageModeling"
    ),
    "trl.SFTConfig": "_VALID_DICT_FIELDS",
    "trl.trainer": "utils",
    "trl.trainer.utils": "FusedCausalLMOutput _CHUNKED_LOGPROB_CHUNK_SIZE _ChunkedLogProbFunction",
}
NAMES = [f"{module}.{name}" for module, names in _BY_MODULE.items() for name in names.split()]

FORWARDS = {
    "transformers.LlamaForCausalLM.forward": (
        "input_ids attention_mask position_ids inputs_embeds labels use_cache logits_to_keep kwargs"
    ),
    "transformers.modeling_flash_attention_utils.FlashAttentionKwargs": (
        "cu_seq_lens_q cu_seq_lens_k max_length_q max_length_k"
    ),
}
# A model of each name of a cache; `CACHES` in `attention/calls.py` lists the names.
CACHED = [
    *("LlamaForCausalLM", "MambaForCausalLM", "ReformerModelWithLMHead"),
    *("RwkvForCausalLM", "XLMWithLMHeadModel", "XLNetLMHeadModel"),
]
