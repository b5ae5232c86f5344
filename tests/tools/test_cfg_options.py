import argparse

import pytest

pytest.importorskip('mmengine')

from cfg_options import ConfigOptions
from mmengine.config import DictAction

# what mmengine's action makes of them is right
SAME = [
    '3',
    '1e-4',
    '-.5',
    'true',
    'False',
    'None',
    '',
    'auto',
    'a=b',
    'work_dirs/x.pth',
    'https://a.b/c?d=e',
    'a,b',
    '1,2.5,x',
    '[]',
    '()',
    '[1]',
    '(1,)',
    '1,',
    '(256,256)',
    '[(1333,480),(1333,800)]',
    '[[1,2],[3,[4,5]]]',
    '[ 1, 2 ]',
    '( 256, 256 )',
    '[(1, 2), (3, 4)]',
    '[a, b, None, true]',
    '"(1,2)"',
    "'text'",
    '["a","b"]',
    "'3'",
    "it's",
    '/a(b)/c',
    '/a[1/b',
]
# text -> value, where mmengine deletes the spaces or misreads the brackets
SPACES = {
    "/a b/it's": "/a b/it's",
    '"/a b/c"': '/a b/c',
    ' /a ': ' /a ',
    'a  b': 'a  b',
    '/a (b)/c d.json': '/a (b)/c d.json',
    ' 3 ': 3,
    '[/a b/c, /d e]': ['/a b/c', '/d e'],
    "('a b','c d')": ('a b', 'c d'),
    'a b,c': ['a b', 'c'],
    '(1,2),(3,4)': [(1, 2), (3, 4)],
    '[(a b, 1), [c d]]': [('a b', 1), ['c d']],
}


def parse(*pairs, action=ConfigOptions):
    parser = argparse.ArgumentParser()
    parser.add_argument('--cfg-options', nargs='+', action=action, default={})
    return parser.parse_args(['--cfg-options', *pairs]).cfg_options


@pytest.mark.parametrize('text', SAME)
def test_values_without_spaces_are_those_of_mmengine(text):
    found = parse(f'a.b={text}')['a.b']
    expected = parse(f'a.b={text}', action=DictAction)['a.b']
    assert repr(found) == repr(expected)  # the types too


@pytest.mark.parametrize(('text', 'expected'), SPACES.items())
def test_spaces_stay(text, expected):
    assert repr(parse(f'key={text}')['key']) == repr(expected)


def test_later_settings_win_and_others_stay():
    parser = argparse.ArgumentParser()
    parser.add_argument('--cfg-options', nargs='+', action=ConfigOptions)
    args = ['--cfg-options', 'a=1', 'b=2', '--cfg-options', 'a=3']
    assert parser.parse_args(args).cfg_options == {'a': 3, 'b': 2}


@pytest.mark.parametrize(
    ('pair', 'message'),
    [
        ('data_root', 'expected KEY=VALUE, got data_root'),
        ('=3', 'expected KEY=VALUE, got =3'),
        ('a=[1,2', 'brackets do not match in a=[1,2'),
        ('a=[1,2)]', 'brackets do not match'),
        ('a=(1],2', 'brackets do not match'),
    ],
)
def test_what_cannot_be_read_is_refused(pair, message, capsys):
    with pytest.raises(SystemExit):
        parse(pair)
    assert message in capsys.readouterr().err
