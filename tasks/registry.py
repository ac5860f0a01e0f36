"""Every task by name, and groups of them. None marks a task measured on a forced text (tasks/texts.py)."""

from tasks import Task, infinitebench, longbench, needle, ruler, two_stage

GROUPS = {
    "ruler": list(ruler.TASKS),
    "retrieval": [*needle.TASKS, *two_stage.TASKS],
    "longbench": list(longbench.TASKS),
    "infinitebench": list(infinitebench.TASKS),
    "texts": ["perplexity", "fidelity"],
}
TASKS: dict[str, Task | None] = {
    **ruler.TASKS,
    **needle.TASKS,
    **two_stage.TASKS,
    **longbench.TASKS,
    **infinitebench.TASKS,
    "perplexity": None,
    "fidelity": None,
}
