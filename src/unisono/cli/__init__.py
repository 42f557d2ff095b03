from unisono.cli.main import main as main
