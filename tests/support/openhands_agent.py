"""An agent of OpenHands's whose terminal is elsewhere: `PYTHON openhands_agent.py URL PROMPT`.

It runs in the environment that GRPO_OPENHANDS names. Each command is a line of JSON on stdout, its
outcome the next line of stdin. All else that the library prints goes to stderr.
"""

import json
import os
import sys
import tempfile

channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
os.dup2(2, 1)
from openhands.sdk import LLM, Agent, Conversation, Tool  # noqa: E402
from openhands.sdk.tool import ToolExecutor, register_tool  # noqa: E402
from openhands.tools.terminal import TerminalTool  # noqa: E402
from openhands.tools.terminal.definition import TerminalObservation  # noqa: E402


class Elsewhere(ToolExecutor):
    """Runs the commands of the terminal."""

    def __call__(self, action, conversation=None):
        """The outcome of a command."""
        print(json.dumps({"command": action.command}), file=channel, flush=True)
        told = json.loads(sys.stdin.readline())
        given = {"command": action.command, "exit_code": told["code"]}
        return TerminalObservation.from_text(told["output"], **given)


class Terminal(TerminalTool):
    """OpenHands's terminal, as the policy sees it."""

    @classmethod
    def create(cls, conv_state, **params):
        """The tool of a conversation."""
        return TerminalTool.create(conv_state, executor=Elsewhere())


def main(url: str, prompt: str) -> None:
    """Holds one conversation."""
    register_tool("terminal", Terminal)
    llm = LLM(model="openai/policy", base_url=url, api_key="none", num_retries=0, usage_id="agent")
    agent = Agent(llm=llm, tools=[Tool(name="terminal")])
    with tempfile.TemporaryDirectory() as folder:
        conversation = Conversation(agent, workspace=folder, visualizer=None)
        conversation.send_message(prompt)
        conversation.run()
        conversation.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
