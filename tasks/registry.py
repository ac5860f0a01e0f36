"""Every task by name, and groups of them. None marks a task measured on a forced text (tasks/texts.py)."""

from tasks import Task, code, needle, ruler, scbench, two_stage

BY_GROUP: dict[str, dict[str, Task | None]] = {
    "ruler": ruler.TASKS,
    "retrieval": needle.TASKS | two_stage.TASKS,
    "scbench": scbench.TASKS,
    "code": code.TASKS,
    "texts": {"perplexity": None, "fidelity": None},
}
GROUPS = {group: list(tasks) for group, tasks in BY_GROUP.items()}
TASKS = {name: task for tasks in BY_GROUP.values() for name, task in tasks.items()}
