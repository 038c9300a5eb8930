"""Parameters of FlashInfer's wrappers that calls of ours name or fill: those of 0.7.4, and what differs in 0.2.10.

`test_flashinfer.py` compares them with an installed package.
"""

from __future__ import annotations

# In the package's order.
SIGNATURES: dict[str, dict[str, tuple[str, ...]]] = {
    "BatchPrefillWithPagedKVCacheWrapper": {
        "__init__": ("float_workspace_buffer", "kv_layout"),
        "plan": (
            "qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len",
            "num_qo_heads", "num_kv_heads", "head_dim_qk", "page_size", "head_dim_vo",
            "custom_mask", "packed_custom_mask", "causal", "pos_encoding_mode",
            "use_fp16_qk_reduction", "sm_scale", "window_left", "logits_soft_cap", "rope_scale",
            "rope_theta", "q_data_type", "kv_data_type", "use_token_head_sf",
        ),
        "run": ("q", "paged_kv_cache", "out", "kv_cache_sf"),
    },
    "BatchDecodeWithPagedKVCacheWrapper": {
        "__init__": (
            "float_workspace_buffer", "kv_layout", "use_cuda_graph", "use_tensor_cores",
            "paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer",
            "backend",
        ),
        "_plan_impl": (
            "indptr", "indices", "last_page_len", "num_qo_heads", "num_kv_heads", "head_dim",
            "page_size", "window_left", "logits_soft_cap", "q_data_type", "kv_data_type",
            "sm_scale", "use_token_head_sf",
        ),
        "run": ("q", "paged_kv_cache", "out", "kv_cache_sf"),
    },
    "BatchAttentionWithAttentionSinkWrapper": {
        "__init__": (
            "float_workspace_buffer", "kv_layout", "q_data_type", "kv_data_type", "head_dim_qk",
            "head_dim_vo", "window_left",
        ),
        "run": ("q", "paged_kv_cache"),
    },
    "BatchMLAPagedAttentionWrapper": {
        "__init__": (
            "float_workspace_buffer", "use_cuda_graph", "qo_indptr", "kv_indptr", "kv_indices",
            "kv_len_arr", "backend",
        ),
        "plan": (
            "num_heads", "head_dim_ckv", "head_dim_kpe", "page_size", "causal", "sm_scale",
            "q_data_type", "kv_data_type", "metadata", "query_layout", "kv_cache_layout",
        ),
        "run": ("out", "query", "kv_cache"),
    },
    "MLAPlanMetadata": {"csr": ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")},
}  # fmt: skip
# What differs in 0.2.10.
OLD_SIGNATURES: dict[str, dict[str, tuple[str, ...]]] = {
    "BatchMLAPagedAttentionWrapper": {
        "__init__": (
            "float_workspace_buffer", "use_cuda_graph", "qo_indptr", "kv_indptr", "kv_indices",
            "kv_len_arr", "backend",
        ),
        "plan": (
            "qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr", "num_heads", "head_dim_ckv",
            "head_dim_kpe", "page_size", "causal", "sm_scale", "q_data_type", "kv_data_type",
        ),
        "run": ("q_nope", "q_pe", "ckv_cache", "kpe_cache", "out"),
    },
}  # fmt: skip
