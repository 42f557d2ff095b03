"""What is trained: tasks, their arguments and learning-rate schedules; built-in tasks are listed but not imported."""

TASKS: dict[str, str] = {
    "digits": "unisono.tasks.builtin.digits:digits",
    "text": "unisono.tasks.builtin.text:text",
}
