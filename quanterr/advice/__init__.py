"""Advice on reducing the error: layers to leave unquantized, programs' options for that, and formats that can mix."""
