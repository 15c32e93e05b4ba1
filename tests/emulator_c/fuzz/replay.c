/* SPDX-License-Identifier: MIT
 * Stands in for libFuzzer where the compiler has none: runs the target on each file, and on each file of each folder, that
 * it's given. */
#define _GNU_SOURCE
#include "fuzz.h"

#include <dirent.h>
#include <sys/stat.h>

static unsigned done;

static int run_file(const char *path)
{
	FILE *f = fopen(path, "rb");
	uint8_t *data = NULL;
	struct stat st;

	if (!f || fstat(fileno(f), &st)) {
		perror(path);
		return 1;
	}
	/* A block of its own, of exactly that size: what reads beyond it is found. */
	data = malloc(st.st_size ? (size_t)st.st_size : 1);
	if (!data || fread(data, 1, (size_t)st.st_size, f) != (size_t)st.st_size) {
		perror(path);
		return 1;
	}
	fclose(f);
	if (getenv("FUZZ_VERBOSE"))
		fprintf(stderr, "%s\n", path);
	LLVMFuzzerTestOneInput(data, (size_t)st.st_size);
	free(data);
	done++;
	return 0;
}

static int run(const char *path)
{
	struct dirent **names;
	int n = scandir(path, &names, NULL, alphasort), failed = 0;
	char file[4096];

	if (n < 0)
		return run_file(path);
	for (int i = 0; i < n; i++) {
		if (names[i]->d_name[0] != '.') {
			snprintf(file, sizeof(file), "%s/%s", path, names[i]->d_name);
			failed |= run_file(file);
		}
		free(names[i]);
	}
	free(names);
	return failed;
}

int main(int argc, char **argv)
{
	int failed = 0;

	for (int i = 1; i < argc; i++)
		failed |= run(argv[i]);
	if (!failed && !done) {
		fprintf(stderr, "no inputs\n");
		return 1;
	}
	printf("%u inputs\n", done);
	return failed;
}
