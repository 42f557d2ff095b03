"""Lets training frameworks keep their loops, and exchange gradients by this library at their own extension points."""
