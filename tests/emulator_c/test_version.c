/* SPDX-License-Identifier: MIT */

unsigned aiordma_emulator_interface(void);

int main(void)
{
	return aiordma_emulator_interface() >= 1 ? 0 : 1;
}
