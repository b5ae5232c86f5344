"""What is read beside weights, and what a file tries to do with it."""

import argparse
import struct
import zipfile

import numpy as np
import pytest
import torch
from mmengine.logging import HistoryBuffer
from torch.serialization import add_safe_globals, get_safe_globals

from soft_mm.models.checkpoint import read_checkpoint

# ---- pickles, written by hand ----


def name(module, attribute):
    return f'c{module}\n{attribute}\n'.encode()


def text(value):
    data = value.encode()
    return b'X' + struct.pack('<I', len(data)) + data


def call(function, *args):
    assert len(args) < 4
    ends = {0: b')', 1: b'\x85', 2: b'\x86', 3: b'\x87'}
    return function + b''.join(args) + ends[len(args)] + b'R'


def pair(first, second):
    return first + second + b'\x86'


def attribute(of, key):
    return call(name('builtins', 'getattr'), of, text(key))


CURVE = name('mmengine.logging.history_buffer', 'HistoryBuffer')
DTYPE = name('numpy', 'dtype')
ARRAY = name('numpy', 'ndarray')


def write(path, pickled):
    """A checkpoint whose dict has the pickled object under ``x``."""
    torch.save({}, path)
    with zipfile.ZipFile(path) as archive:
        files = {n: archive.read(n) for n in archive.namelist()}
    with zipfile.ZipFile(path, 'w') as archive:
        for n, content in files.items():
            if n.endswith('data.pkl'):
                content = b'\x80\x02}' + text('x') + pickled + b's.'
            archive.writestr(n, content)
    return str(path)


def poisoned():
    """Puts eval where a class of the list looks for NumPy, and calls it."""
    builtins = attribute(name('builtins', 'getattr'), '__self__')
    space = attribute(attribute(CURVE, '__init__'), '__globals__')
    namespace = (
        name('argparse', 'Namespace')
        + b')\x81}'
        + text('array')
        + attribute(builtins, 'eval')
        + b'sb'
    )
    code = text("__import__('os').mkdir('hacked')")
    return pair(space + text('np') + namespace + b's', call(CURVE, code, code))


def with_flags():
    """A type whose numbers NumPy would take for addresses of objects."""
    state = b'(' + b'K\x03' + text('<') + b'NNN' + b'J\xff\xff\xff\xff' * 2
    return call(DTYPE, text('f8'), b'\x89', b'\x88') + state + b'K?tb'


@pytest.mark.parametrize(
    ('pickled', 'what'),
    [
        (name('os', 'system'), 'os.system'),
        (name('posix', 'system'), 'posix.system'),
        (name('builtins', 'eval'), 'eval'),
        (poisoned(), 'builtins.getattr'),
        (attribute(name('numpy', 'dtype'), 'char'), 'builtins.getattr'),
        (call(DTYPE, text('O')), "numpy.dtype of 'O'"),
        (call(DTYPE, text('O8')), "numpy.dtype of 'O8'"),
        (call(DTYPE, text('f8,O')), 'numpy.dtype of'),
        (call(name('_codecs', 'decode'), text('a')), '_codecs.decode'),
    ],
)
def test_what_could_run_code_is_refused(pickled, what, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = HistoryBuffer.__init__.__globals__['np']
    path = write(tmp_path / 'file.pth', pickled)
    with pytest.raises(ValueError, match='could run code') as caught:
        read_checkpoint(path)
    assert what in str(caught.value)
    assert 'weights_only=False' in str(caught.value)
    assert '\n' not in str(caught.value)
    assert HistoryBuffer.__init__.__globals__['np'] is before
    assert not (tmp_path / 'hacked').exists()


@pytest.mark.parametrize(
    'pickled',
    [
        # eight letters as the address of an object: printing it would crash
        call(ARRAY, b'K\x01\x85', text('O'), text('AAAAAAAA')),
        call(CURVE, b']', b']'),
        b'h\x07',  # of an empty memo
        b'R',
        b'(',
        ARRAY + b')\x81',  # never filled
        ARRAY + b')\x81' + text('state') + b'b',
        CURVE + b')\x81}b',
    ],
)
def test_nonsense_is_refused(pickled, tmp_path):
    path = write(tmp_path / 'file.pth', pickled)
    with pytest.raises(ValueError, match=r'file\.pth.* is damaged') as caught:
        read_checkpoint(path)
    assert '\n' not in str(caught.value)


def test_the_flags_of_a_type_are_not_taken_from_the_file(tmp_path):
    dtype = read_checkpoint(write(tmp_path / 'file.pth', with_flags()))['x']
    assert dtype == np.dtype('f8')
    assert not dtype.hasobject
    assert dtype.flags == np.dtype('f8').flags


def array_of(count, data):
    dtype = call(DTYPE, text('f8'), b'\x89', b'\x88') + (
        b'(K\x03' + text('<') + b'NNN' + b'J\xff\xff\xff\xff' * 2 + b'K\x00tb'
    )
    reconstruct = name('numpy._core.multiarray', '_reconstruct')
    content = call(name('_codecs', 'encode'), text(data), text('latin1'))
    shape = b'J' + struct.pack('<i', count) + b'\x85'
    state = b'(K\x01' + shape + dtype + b'\x89' + content + b'tb'
    return call(reconstruct, ARRAY, b'K\x00\x85', text('b')) + state


def test_an_array_has_the_numbers_of_the_file_and_no_more(tmp_path):
    data = np.array([1.5, -2.0]).tobytes().decode('latin1')
    good = read_checkpoint(write(tmp_path / 'file.pth', array_of(2, data)))
    assert good['x'].tolist() == [1.5, -2.0]
    for count in (3, 2**31 - 1, -2):
        path = write(tmp_path / 'file.pth', array_of(count, data))
        with pytest.raises(ValueError, match='is damaged'):
            read_checkpoint(path)


def records():
    curve = HistoryBuffer([0.5, 0.25], [1, 2], max_length=7)
    return dict(
        args=argparse.Namespace(lr=np.float32(1e-3), sizes=np.arange(3)),
        best=np.float64(79.3),
        steps=np.int64(2**40),
        table=np.asfortranarray(np.arange(6, dtype='i2').reshape(2, 3)),
        swapped=np.arange(3, dtype='>i4'),
        flags=[np.array([True, False]), (np.zeros((0, 4)), np.array(2.5))],
        curves=dict(loss=curve),
    )


def test_records_are_read_as_they_were(tmp_path):
    torch.save(records(), tmp_path / 'file.pth')
    found, expected = read_checkpoint(str(tmp_path / 'file.pth')), records()
    assert found['args'].lr == expected['args'].lr
    pairs = [
        (found['args'].sizes, expected['args'].sizes),
        (found['flags'][0], expected['flags'][0]),
        (found['flags'][1][0], expected['flags'][1][0]),
        (found['flags'][1][1], expected['flags'][1][1]),
    ]
    pairs += [
        (found[k], expected[k]) for k in ('best', 'steps', 'table', 'swapped')
    ]
    for a, b in pairs:
        assert type(a) is type(b)
        assert a.dtype == b.dtype
        assert a.flags.f_contiguous == b.flags.f_contiguous
        np.testing.assert_array_equal(a, b, strict=True)
    curve = found['curves']['loss']
    assert type(curve) is HistoryBuffer
    curve.update(0.75, 1)
    np.testing.assert_array_equal(curve.data[0], [0.5, 0.25, 0.75])
    np.testing.assert_array_equal(curve.data[1], [1, 2, 1])
    assert curve.max_length == 7
    assert curve.statistics('max') == 0.75


def test_a_list_in_itself_is_read(tmp_path):
    knot = [1]
    knot.append(knot)
    torch.save(dict(knot=knot), tmp_path / 'file.pth')
    found = read_checkpoint(str(tmp_path / 'file.pth'))['knot']
    assert found[1] is found


def test_what_is_shared_is_made_once(tmp_path):
    """Forty times two tuples of the last one would be 10^12."""
    shared = array = np.arange(3)
    for _ in range(40):
        shared = (shared, shared)
    torch.save(dict(x=shared, a=[array, array]), tmp_path / 'file.pth')
    found = read_checkpoint(str(tmp_path / 'file.pth'))
    assert found['a'][0].tolist() == [0, 1, 2]
    assert found['a'][0] is found['a'][1]
    while isinstance(found['x'], tuple):
        assert found['x'][0] is found['x'][1]
        found['x'] = found['x'][0]
    assert found['x'] is found['a'][0]


@pytest.fixture
def _list_of_torch():
    """Leaves torch's list of what may be read as it was."""
    before = get_safe_globals()
    yield
    torch.serialization.clear_safe_globals()
    add_safe_globals(before)


@pytest.mark.usefixtures('_list_of_torch')
def test_the_list_of_the_process_stays_its_own(tmp_path):
    add_safe_globals([getattr, np.dtype])
    before = set(get_safe_globals())
    with pytest.raises(ValueError, match='could run code'):
        read_checkpoint(write(tmp_path / 'file.pth', poisoned()))
    assert set(get_safe_globals()) == before


# ---- tensors ----


@pytest.mark.parametrize(
    ('tensor', 'message'),
    [
        (
            torch.zeros(1).expand(10**12),
            r'\(1000000000000,\) has only 4 bytes',
        ),
        (torch.eye(3).to_sparse(), 'not an ordinary one: torch.sparse_coo'),
        (torch.empty(9, device='meta'), 'device meta'),
    ],
)
@pytest.mark.parametrize(
    'place', [lambda x: {'x': x}, lambda x: {'x': [(x,)]}]
)
def test_a_tensor_that_is_not_all_there_is_refused(
    tensor, message, place, tmp_path
):
    torch.save(place(tensor), tmp_path / 'file.pth')
    with pytest.raises(ValueError, match=message):
        read_checkpoint(str(tmp_path / 'file.pth'))


def test_views_and_shared_numbers_are_read(tmp_path):
    table = torch.arange(12.0).reshape(3, 4)
    torch.save(dict(a=table, b=table.T, c=table[1]), tmp_path / 'file.pth')
    found = read_checkpoint(str(tmp_path / 'file.pth'))
    assert found['b'].equal(table.T)
    assert found['c'].tolist() == [4, 5, 6, 7]


def test_a_compressed_file_is_refused(tmp_path):
    torch.save({'x': torch.zeros(10**6)}, tmp_path / 'file.pth')
    bomb = tmp_path / 'bomb.pth'
    with zipfile.ZipFile(tmp_path / 'file.pth') as source:
        with zipfile.ZipFile(bomb, 'w', zipfile.ZIP_DEFLATED) as target:
            for n in source.namelist():
                target.writestr(n, source.read(n))
    assert bomb.stat().st_size < 10**5
    with pytest.raises(ValueError, match=r'compressed, and has 4\d{6} bytes'):
        read_checkpoint(str(bomb))
