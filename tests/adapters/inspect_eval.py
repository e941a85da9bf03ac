"""Two samples of a task with a scripted model, each in a box of its own; prints what came of it as JSON."""

import json
import sys
from pathlib import Path

from inspect_ai import Task, eval
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import includes
from inspect_ai.tool import bash, python
from inspect_ai.util import SandboxEnvironmentSpec

from livinglayer.edges.adapters.inspect_ai import Shape


def says(tool: str, **arguments: str) -> ModelOutput:
    """The model's next answer; without its usage Inspect would fetch a tokenizer to count."""
    output = ModelOutput.for_tool_call("mockllm/model", tool, arguments)
    output.usage = ModelUsage(input_tokens=1, output_tokens=1, total_tokens=2)
    return output


logs, cleanup = sys.argv[1], sys.argv[2] == "clean"
script = [
    says("bash", command="rev < word.txt | tee answer.txt; id -un; ls /home/user"),
    says("python", code="print(open('answer.txt').read().strip().upper())"),
    says("bash", command="sleep 60"),
    says("submit", answer="reward"),
]
task = Task(
    dataset=[
        Sample(id="drawer", input="Reverse the word in word.txt.", target="reward", files={"word.txt": "drawer\n"}),
        Sample(id="stressed", input="Reverse it.", target="desserts", files={"word.txt": "stressed\n"}),
    ],
    solver=react(tools=[bash(timeout=1), python(timeout=30)]),
    scorer=includes(),
    sandbox=SandboxEnvironmentSpec("layer", Shape(memory="256M")),
)
[log] = eval(
    task,
    model=get_model("mockllm/model", custom_outputs=[*script, *script]),
    max_samples=1,
    log_dir=logs,
    sandbox_cleanup=cleanup,
    display="plain",
)
assert log.samples is not None, log.error
said = {
    str(sample.id): {
        "score": sample.scores["includes"].value if sample.scores else sample.error and sample.error.message,
        "tools": [message.text or str(message.error) for message in sample.messages if message.role == "tool"],
    }
    for sample in log.samples
}
Path(logs, "said.json").write_text(json.dumps({"status": log.status, "samples": said}))
