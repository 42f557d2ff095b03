"""The built-in tasks by name, as ``module:function`` strings, so that listing them imports nothing."""

TASKS: dict[str, str] = {
    "digits": "unisono.tasks.builtin.digits:digits",
    "text": "unisono.tasks.builtin.text:text",
}
