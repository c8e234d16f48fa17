/* For every file of the kernel: IEEE float32 and float64, each product and sum rounded by itself.
 *
 * Options that change bits, as CFLAGS may hold them, are refused here, whatever builds the files; NumPy computes then.
 * Options that undo them would protect one build only. clang has no macros for most of them, but pragmas that undo all.
 * What the linker is given does not show here: see pyproject.toml.
 */
#include <float.h>

#if defined __FAST_MATH__ || defined __ASSOCIATIVE_MATH__ || defined __RECIPROCAL_MATH__ \
    || defined __NO_SIGNED_ZEROS__ || (defined __FINITE_MATH_ONLY__ && __FINITE_MATH_ONLY__)
#error "-ffast-math and the options that it consists of change the bits of rows"
#endif
#if FLT_EVAL_METHOD != 0
#error "float must be computed in its own precision"
#endif
#ifdef __clang__ /* gcc takes -ffp-contract=off alone */
#pragma float_control(precise, on)
#pragma STDC FP_CONTRACT OFF
#endif
