"""Options of other servers' command lines, by what they are for, as their documentation names them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Peer:
    """A server whose options people know: `vllm serve`."""

    page: str  # of docs/coming-from
    command: str
    version: str  # whose option names these are
    options: Mapping[str, str]  # what for -> flags


VLLM = Peer(
    "vllm.md",
    "vllm serve",
    "vLLM 0.32",
    {
        "Model": """--model --served-model-name --revision --dtype --quantization --load-format
            --download-dir --hf-token --trust-remote-code --hf-overrides --tokenizer --tokenizer-mode
            --skip-tokenizer-init --runner --enable-lora --lora-modules --limit-mm-per-prompt
            --model-impl""",
        "Sizes": """--max-model-len --max-num-seqs --max-num-batched-tokens --max-num-queued-reqs
            --max-num-queued-tokens --gpu-memory-utilization --kv-cache-memory-bytes
            --num-gpu-blocks-override --block-size --kv-cache-dtype""",
        "Cache": """--enable-prefix-caching --prefix-caching-hash-algo --kv-offloading-size
            --kv-offloading-backend --kv-transfer-config --cpu-offload-gb --kv-events-config
            --prefix-match-unit --kv-cache-metrics""",
        "Scheduling and speculation": """--enable-chunked-prefill --async-scheduling
            --scheduling-policy --speculative-config --spec-method --spec-tokens --spec-model
            --stream-interval --seed""",
        "Devices": """--tensor-parallel-size --data-parallel-size --pipeline-parallel-size
            --enable-expert-parallel --distributed-executor-backend --api-server-count --attention-backend
            --enforce-eager --compilation-config --disable-custom-all-reduce""",
        "Answers": """--generation-config --override-generation-config --tool-call-parser
            --enable-auto-tool-choice --exclude-tools-when-tool-choice-none --reasoning-parser
            --structured-outputs-config --chat-template --default-chat-template-kwargs --max-logprobs
            --logits-processors --enable-prompt-tokens-details --enable-force-include-usage""",
        "Server": """--host --port --api-key --root-path --ssl-keyfile --ssl-certfile
            --allowed-origins --middleware --uvicorn-log-level --enable-log-requests
            --disable-log-stats --otlp-traces-endpoint --shutdown-timeout --config""",
    },
)

SGLANG = Peer(
    "sglang.md",
    "sglang serve",
    "SGLang 0.5",
    {
        "Model": """--model-path --served-model-name --revision --dtype --quantization --load-format
            --download-dir --trust-remote-code --tokenizer-path --tokenizer-mode
            --skip-tokenizer-init --is-embedding --enable-lora --lora-paths --enable-multimodal
            --torchao-config --model-impl""",
        "Sizes": """--context-length --max-running-requests --chunked-prefill-size
            --max-prefill-tokens --max-queued-requests --mem-fraction-static --max-total-tokens
            --page-size --kv-cache-dtype""",
        "Cache": """--disable-radix-cache --radix-eviction-policy --enable-hierarchical-cache
            --hicache-ratio --hicache-size --hicache-write-policy --hicache-storage-backend
            --enable-lmcache --cpu-offload-gb --kv-events-config --enable-cache-report""",
        "Scheduling and speculation": """--schedule-policy --schedule-conservativeness
            --enable-priority-scheduling --enable-mixed-chunk --disable-overlap-schedule
            --num-continuous-decode-steps --speculative-algorithm --speculative-num-draft-tokens
            --speculative-draft-model-path --random-seed --watchdog-timeout --stream-interval""",
        "Devices": """--device --tp-size --dp-size --pp-size --ep-size --disaggregation-mode
            --attention-backend --disable-cuda-graph --enable-torch-compile
            --enable-deterministic-inference --disable-custom-all-reduce""",
        "Answers": """--sampling-defaults --tool-call-parser --reasoning-parser --grammar-backend
            --chat-template --enable-custom-logit-processor --allow-auto-truncate""",
        "Server": """--host --port --api-key --admin-api-key --fastapi-root-path --log-level
            --log-requests --enable-metrics --enable-trace --warmups --config""",
    },
)

LLAMA_CPP = Peer(
    "llama-cpp.md",
    "llama-server",
    "llama.cpp of November 2026",
    {
        "Model": """--model -m --hf-repo -hf --hf-file --hf-token --offline --alias --lora --mmproj
            --numa --load-mode --override-kv --models-dir""",
        "Sizes": """--ctx-size -c --parallel -np --batch-size -b --ubatch-size -ub --cache-type-k
            --cache-type-v --threads -t --threads-batch --predict -n""",
        "Cache": """--cache-prompt --cache-reuse --cache-ram --slot-save-path --kv-unified
            --swa-full --ctx-checkpoints --context-shift --keep --slots""",
        "Devices": """--device --n-gpu-layers -ngl --split-mode --tensor-split --main-gpu
            --flash-attn -fa --cpu-moe --rpc""",
        "Scheduling and speculation": """--cont-batching --spec-type --spec-draft-n-max --model-draft
            --lookup-cache-dynamic --warmup""",
        "Sampling": """--seed --temp --top-k --top-p --min-p --repeat-penalty --repeat-last-n
            --presence-penalty --frequency-penalty --typical --mirostat --dry-multiplier
            --xtc-probability --dynatemp-range --samplers --ignore-eos --logit-bias --grammar
            --json-schema""",
        "Answers": """--jinja --chat-template --chat-template-kwargs --reasoning-format
            --reasoning-budget --embeddings --reranking --pooling""",
        "Server": """--host --port --api-key --api-key-file --ssl-key-file --ssl-cert-file
            --cors-origins --api-prefix --timeout --threads-http --metrics --props --ui --tools
            --log-disable --log-file --verbose""",
    },
)

PEERS = (VLLM, SGLANG, LLAMA_CPP)
