"""What is read from machine code: of text as the disassembler prints it, and of real kernels."""

from __future__ import annotations

import flexc
from flexc import masks
from flexc.sass import read

TEXT = """
.text.attention_forward:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0380*/                   USETMAXREG.DEALLOC.CTAPOOL 0x18 ;
.L_x_1:
        /*0390*/                   USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xf0 ;
        /*03a0*/                   UTMALDG.4D [UR8], [UR4] ;
        /*19d0*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR44], RZ, !UPT ;
        /*19e0*/              @!P0 HGMMA.64x128x16.F32.BF16 R24, gdesc[UR44], R24, gsb0 ;
        /*19f0*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*1a00*/                   HMMA.16816.F32.BF16 R4, R8, R12, RZ ;
        /*1a10*/                   STL [R1], R4 ;
        /*1a20*/                   STL.64 [R1+0x8], R4 ;
        /*1a30*/         @P1       LDL.LU R4, [R1] ;
        /*1a40*/                   LDL.128 R4, [R1] ;
        /*1a50*/                   LDL.U8 R4, [R1] ;
        /*1a60*/                   STS.128 [R1], R4 ;
        /*1a70*/                   FMUL R4, R4, R4 ;
"""


def test_read() -> None:
    found = read(TEXT)
    assert found.matrix == {"HGMMA": 2, "HMMA": 1}
    assert found.copies == {"UTMALDG": 1}
    assert (found.stored, found.loaded) == (4 + 8, 4 + 16 + 1)
    assert found.waits == 1
    assert found.budgets == (240, 24)


def test_kernels_for_three_generations() -> None:
    expected = {"sm80": ("HMMA", "LDGSTS"), "sm90": ("HGMMA", "UTMALDG"), "sm100": ("UTCHMMA", "LDGSTS")}
    for target, (product, copy) in expected.items():
        kernel = flexc.compile(mask_mod=masks.causal, head_dim=64, target=target)
        (sass,) = kernel.sass.values()
        found = read(sass)
        assert found.matrix.get(product), (target, found)
        assert found.copies.get(copy), (target, found)
        assert (found.stored + found.loaded > 0) == (kernel.resources["attention_forward"].spills > 0)
