/* SPDX-License-Identifier: MIT
 *
 * Lets the Python side check that the library it loaded is the one it was built with.
 */

__attribute__((visibility("default"))) unsigned aiordma_emulator_interface(void);

/* To be raised whenever an exported function changes its meaning or its arguments. */
unsigned aiordma_emulator_interface(void)
{
	return 1;
}
