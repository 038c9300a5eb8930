"""guidellm: a benchmark of concurrent streams."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from report import MODEL, SCRATCH, TOKENIZER, URL, case


@case("concurrent streams over chat completions")
def _() -> str:
    output = Path(SCRATCH) / "guidellm.json"
    command = [
        str(Path(sys.executable).parent / "guidellm"), "run",
        "--backend", f"kind=openai_http,target={URL},model={MODEL}",
        "--profile", "kind=concurrent,streams=4", "--constraint", "kind=max_requests,count=20",
        "--tokenizer", f"kind=hf_auto,model={TOKENIZER}",
        "--data", "kind=synthetic_text,prompt_tokens=128,output_tokens=16",
        "--output", f"kind=json,path={output}",
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, (result.stderr or result.stdout)[-300:]
    report = json.loads(output.read_text())
    requests = report["benchmarks"][0]["metrics"]["request_totals"]
    assert requests["successful"] == 20, requests
    return str(requests)
