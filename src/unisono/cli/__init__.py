from unisono.cli.command import main as main
