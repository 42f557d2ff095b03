"""What is trained: tasks, their arguments, learning-rate schedules. Built-in ones are listed as text, not imported."""

TASKS: dict[str, str] = {
    "digits": "unisono.tasks.builtin.digits:digits",
    "text": "unisono.tasks.builtin.text:text",
}
