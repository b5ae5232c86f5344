"""The option --cfg-options, with values as they were typed."""

import argparse

from mmengine.config import DictAction

# in the form of an opening and a closing one
BRACKETS = {'[]': list, '()': tuple}


class ConfigOptions(DictAction):
    """mmengine's action, except that spaces stay in the values.

    mmengine deletes them, so that a path that has one becomes another path.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: list[str],
        option_string: str | None = None,
    ) -> None:
        """Add the settings to those of the option's earlier occurrences."""
        options = dict(getattr(namespace, self.dest) or {})
        for pair in values:
            key, equals, text = pair.partition('=')
            if not (key and equals):
                parser.error(
                    f'{option_string}: expected KEY=VALUE, got {pair}'
                )
            try:
                options[key] = parse_value(text)
            except ValueError as error:
                parser.error(f'{option_string}: {error} in {pair}')
        setattr(namespace, self.dest, options)


def parse_value(text: str) -> object:
    """The value that a text of the command line stands for.

    Args:
        text: A list as ``[a,b]`` or ``a,b``, a tuple as ``(a,b)``, one in
            another, a number, ``true``, ``false``, ``None``, or else a
            string. Quotes around any of them are dropped, and so are spaces
            around the elements of a list or tuple.

    Raises:
        ValueError: If brackets in a list or tuple do not match.
    """
    while len(text) > 1 and text[0] == text[-1] and text[0] in '\'"':
        text = text[1:-1]
    inner = text.strip()
    elements = split_elements(inner) if ',' in inner else [inner]
    if len(elements) > 1 or inner.endswith(','):
        return [parse_value(element) for element in elements]
    if kind := BRACKETS.get(inner[:1] + inner[-1:]):
        return kind(map(parse_value, split_elements(inner[1:-1])))
    value = DictAction._parse_int_float_bool(inner)
    return text if isinstance(value, str) else value


def split_elements(text: str) -> list[str]:
    """Split at the commas that are not in brackets.

    Args:
        text: A list without its own brackets.

    Raises:
        ValueError: If brackets do not match.
    """
    elements, open_ones = [''], []
    for char in text:
        if char == ',' and not open_ones:
            elements.append('')
            continue
        elements[-1] += char
        if char in '([':
            open_ones.append(char)
        elif char in ')]' and (
            not open_ones or open_ones.pop() + char not in BRACKETS
        ):
            raise ValueError('brackets do not match')
    if open_ones:
        raise ValueError('brackets do not match')
    if not elements[-1].strip():
        elements.pop()  # after a last comma, or there is nothing at all
    return [element.strip() for element in elements]
