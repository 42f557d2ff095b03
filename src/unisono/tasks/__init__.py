"""The built-in tasks by name, as ``module:function`` strings, so that listing them imports nothing."""

TASKS: dict[str, str] = {
    "digits": "unisono.tasks.digits:digits",
    "text": "unisono.tasks.text:text",
}
