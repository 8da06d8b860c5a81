"""Small configurations of any class of transformers: its own defaults, with every size that has a known name made small."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

WORDS = 128
_WIDTH, _HEADS, _LAYERS = 32, 4, 2

# What a class is taken for, in this order: the first that knows a model type names its class.
TASKS = (
    "IMAGE_TEXT_TO_TEXT", "CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "MULTIMODAL_LM", "MASKED_LM", "CTC",
    "IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION", "OBJECT_DETECTION", "SEMANTIC_SEGMENTATION", "UNIVERSAL_SEGMENTATION",
    "DEPTH_ESTIMATION", "TEXT_TO_WAVEFORM", "TEXT_TO_SPECTROGRAM", "VIDEO_CLASSIFICATION", "ZERO_SHOT_IMAGE_CLASSIFICATION", "PRETRAINING",
)  # fmt: skip

# The names that sizes have in configurations, by what they are made.
_NAMES = {
    WORDS: """
        vocab_size src_vocab_size tgt_vocab_size text_vocab_size encoder_vocab_size decoder_vocab_size vocab_size_per_layer_input
        audio_vocab_size codebook_size byte_group_vocab_size encoder_hash_byte_group_vocab""",
    _WIDTH: """
        hidden_size d_model n_embd dim embed_dim hidden_dim width embedding_size projection_dim embedding_dim encoder_hidden_size
        decoder_hidden_size text_embed_dim word_embed_proj_dim attention_hidden_size out_hidden_size output_dim text_hidden_size
        lm_d_inner encoder_embed_dim decoder_embed_dim vision_embed_dim hidden_size_per_layer_input audio_hidden_size vision_hidden_size
        d_embed lru_width dim_model emb_dim encoder_dim output_hidden_size model_dim cross_attention_hidden_size backbone_hidden_size
        hidden_size_global pooler_output_size projector_dim projector_hidden_size input_dim qformer_hidden_size fc_dim""",
    48: """
        intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff d_inner dim_ff mlp_dim n_inner moe_intermediate_size
        shared_expert_intermediate_size ffn_hidden_size inner_dim intermediate_size_mlp shared_intermediate_size
        expert_ffn_hidden_size dense_intermediate_size moe_shared_expert_intermediate_size block_ff_dim feed_forward_size
        ffn_dim_size moe_latent_size""",
    _HEADS: """
        num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads attention_heads num_attn_heads
        num_encoder_attention_heads num_decoder_attention_heads decoder_num_attention_heads index_n_heads linear_num_value_heads
        mm_tokens_per_image num_experts num_local_experts n_routed_experts moe_num_experts num_queries num_query_tokens n_experts""",
    _LAYERS: """
        num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers depth num_decoder_layers num_encoder_layers
        num_hidden_groups encoder_num_hidden_layers decoder_num_hidden_layers num_block_layers resampler_n_layers resampler_depth
        num_blocks num_codebooks num_adapter_layers text_encoder_layers num_conformer_layers
        num_key_value_heads num_kv_heads n_group topk_group linear_num_key_heads num_global_key_value_heads
        decoder_num_key_value_heads encoder_num_key_value_heads n_shared_experts num_shared_experts moe_topk num_experts_per_tok
        num_experts_per_token moe_k moe_top_k num_experts_per_tok_per_layer""",
    8: """
        head_dim d_kv d_head qk_nope_head_dim qk_rope_head_dim v_head_dim index_head_dim kv_channels attention_head_dim
        global_head_dim swa_head_dim linear_key_head_dim linear_value_head_dim rotary_dim mamba_d_head mamba_head_dim""",
    16: """
        kv_lora_rank q_lora_rank mamba_d_state state_size ssm_state_size index_topk sliding_window window attention_window_size
        chunk_size mamba_chunk_size attention_chunk_size local_window_size block_size qk_head_dim lora_r patch_size num_mel_bins
        mamba_n_heads mamba_num_heads n_mels feature_size""",
    64: """
        max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length seq_length context_length max_target_positions
        max_source_positions image_size max_2d_position_embeddings max_seq_length""",
    1: "first_k_dense_replace num_nextn_predict_layers num_mtp_layers",
}
_SIZES = {name: size for size, names in _NAMES.items() for name in names.split()}
_TOKENS = {
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sep_token_id": 3,
    "cls_token_id": 4,
    "mask_token_id": 5,
}
_CLASSES = {  # the maps name the class of a part
    "musicgen": "MusicgenForConditionalGeneration", "musicgen_melody": "MusicgenMelodyForConditionalGeneration",
}  # fmt: skip
_NONE = ("dropout", "drop", "pdrop", "layerdrop", "drop_path_rate", "jitter_noise", "mask_time_prob", "mask_feature_prob")


def model_types() -> dict[str, tuple[str, str]]:
    """Of every type of model: (what its class is for, the class's name). A class of several types goes to the one it is called after."""
    found: dict[str, tuple[str, str]] = {}
    for kind in sorted(CONFIG_MAPPING_NAMES):
        for task in (*TASKS, ""):
            names = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES" if task else "MODEL_MAPPING_NAMES")
            if kind in names:
                name = names[kind] if isinstance(names[kind], str) else names[kind][0]
                found[kind] = (task or "BASE", name)
                break
    found |= {kind: ("TEXT_TO_WAVEFORM", name) for kind, name in _CLASSES.items()}
    first = {found[kind]: kind for kind in sorted(found, key=lambda kind: _called_after(found[kind][1], kind))}
    return {kind: what for kind, what in found.items() if first[what] == kind}


def _called_after(name: str, kind: str) -> bool:
    return name.lower().startswith(kind.replace("-", "").replace("_", ""))


def tiny_config(kind: str) -> PreTrainedConfig:
    """A configuration of this type whose model is small, has no dropout, and knows `WORDS` words."""
    return shrink(CONFIG_MAPPING[kind]())


def shrink(config: PreTrainedConfig) -> Any:
    small = {name: value for name, old in vars(config).items() if (value := _small(name, old)) is not None}
    tokens = [name for name, old in vars(config).items() if name.endswith(("token_id", "token_index")) and isinstance(old, int)]
    small |= {name: _TOKENS.get(name, WORDS - 1 - place) for place, name in enumerate(sorted(tokens))}
    if "kv_lora_rank" in small:  # its keys have as many heads as its queries, whatever the name says
        small["num_key_value_heads"] = _HEADS
    if config.model_type.startswith(_THREE_AXES):
        small["rope_parameters"] = {**config.rope_parameters, "mrope_section": [2, 1, 1]}
    kinds = [list(dict.fromkeys(getattr(config, name, None) or [])) for name in _KINDS]
    layers = max(_LAYERS, *map(len, kinds))
    small |= {name: (every * layers)[:layers] for name, every in zip(_KINDS, kinds, strict=True) if every}
    if any(kinds):
        small |= {name: layers for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers") if name in small}
    small = {name: value for name, value in small.items() if not isinstance(getattr(type(config), name, None), property)}
    return type(config)(**small | SPECIAL.get(config.model_type, {}))


def _small(name: str, old: Any) -> Any:
    if isinstance(old, PreTrainedConfig):
        return shrink(old)
    if isinstance(old, bool) or name.startswith("_"):
        return None
    if isinstance(old, float) and any(part in name for part in _NONE):
        return 0.0
    if isinstance(old, int) and name in _SIZES:
        return min(old, _SIZES[name])
    if isinstance(old, (list, tuple)) and all(type(each) is int for each in old) and name in _STAGES:
        return [min(each, small) for each, small in zip(old, (_STAGES[name] * len(old))[: len(old)], strict=True)]
    return None


_STAGES = {
    "depths": (1,),
    "num_layers": (1,),
    "hidden_sizes": (16, 16, 32, 32),
    "embed_dims": (16, 16, 32, 32),
    "neck_hidden_sizes": (16, 16, 32, 32),
}
_KINDS = ("layer_types", "mlp_layer_types", "layers_block_type")  # one of each kind will do
_THREE_AXES = (  # their rotary positions have three parts
    "qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text", "glm4v_text", "glm4v_moe_text", "glm_ocr_text", "glm46v_text",
    "paddleocr_vl_text",
)  # fmt: skip
_VOCABULARY = {"<image>": WORDS - 1, **{f"IMGIMG{letter}Z": 91 + place for place, letter in enumerate("ABCDEFGH")}}
_EMU3 = {"<image>": WORDS - 1, "<|extra_200|>": 99, **{f"<|visual token {code:06}|>": 91 + code for code in range(8)}}
_STAGED = {"hidden_sizes": (16, 16, 32, 32), "depths": (1, 1, 2, 1)}
SPECIAL: dict[str, dict[str, Any]] = {  # what the names don't tell, by type of model
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "bit": {"num_groups": 8},
    "mamba2": {"num_heads": 8},
    "bamba": {"mamba_n_heads": 8},
    "falcon_h1": {"mamba_n_heads": 8},
    "granitemoehybrid": {"mamba_n_heads": 8},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_ocr2_text": {"num_experts_per_tok": 2},
    "unlimited_ocr_text": {"num_experts_per_tok": 2},
    "blip-2": {"image_token_index": WORDS - 1},
    "instructblip": {"image_token_index": WORDS - 1},
    "instructblipvideo": {"video_token_index": WORDS - 1},
    "chameleon": {"vocabulary_map": _VOCABULARY},
    "emu3": {"vocabulary_map": _EMU3},
    "chameleon_vqgan": {"base_channels": 32, "num_embeddings": 8},
    "emu3_vqgan": {"base_channels": 32, "channel_multiplier": [1, 1, 2, 2], "hidden_size": 64, "codebook_size": 8},
    "janus_vqgan": {"base_channels": 32, "channel_multiplier": [1, 1, 1, 2, 2]},
    "llava_next": {"image_grid_pinpoints": [[64, 64]]},
    "llava_next_video": {"image_grid_pinpoints": [[64, 64]]},
    "llava_onevision": {"image_grid_pinpoints": [[64, 64]]},
    "ministral": {"layer_types": ["full_attention", "sliding_attention"], "head_dim": 8},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "florence_vision": {
        "embed_dim": (16, 32), "num_heads": (2, 2), "num_groups": (2, 2), "depths": (1, 2), "patch_size": (7, 3), "patch_stride": (4, 2),
        "patch_padding": (3, 1), "patch_prenorm": (False, True), "window_size": 4, "projection_dim": 32,
    },
    "funnel": {"block_sizes": [1, 1], "block_repeats": None},
    "glpn": {"hidden_sizes": (16, 16, 32, 32), "depths": (1, 1, 1, 1)},
    "poolformer": _STAGED,
    "pvt": {**_STAGED, "num_attention_heads": (1, 1, 2, 2), "sequence_reduction_ratios": (8, 4, 2, 1)},
}  # fmt: skip
