#include "memory.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

enum { PATH_BYTES = 4096 };

static uint64_t smaller(uint64_t a, uint64_t b) {
  return a < b ? a : b;
}
static uint64_t larger(uint64_t a, uint64_t b) {
  return a > b ? a : b;
}

// ---------------------------------------------------------------------------------------------------------------------
// Files of one number, and files of "name number" lines

static FILE *open_at(const char *folder, const char *name) {
  char path[PATH_BYTES];
  const int n = snprintf(path, sizeof path, "%s/%s", folder, name);
  return n > 0 && (size_t)n < sizeof path ? fopen(path, "re") : NULL;
}

// False also for "max".
static bool read_number(const char *folder, const char *name, uint64_t *out) {
  FILE *file = open_at(folder, name);
  if (!file) return false;
  const bool ok = fscanf(file, "%" SCNu64, out) == 1;
  fclose(file);
  return ok;
}

// The number behind `key`, which ends with what separates the two.
static bool read_field(const char *folder, const char *name, const char *key, uint64_t *out) {
  FILE *file = open_at(folder, name);
  if (!file) return false;
  char line[256];
  bool found = false;
  while (!found && fgets(line, sizeof line, file)) {
    found = strncmp(line, key, strlen(key)) == 0 && sscanf(line + strlen(key), "%" SCNu64, out) == 1;
  }
  fclose(file);
  return found;
}

// ---------------------------------------------------------------------------------------------------------------------
// Control groups

typedef struct {
  const char *file_system;  // as mountinfo has it
  const char *controller;   // NULL: version 2, whose controllers share one tree
  const char *limits[2];
  const char *usage;
  const char *reclaimable;  // key of memory.stat, of the group and those below it
} group_version;

static const group_version kVersions[] = {
    {"cgroup2", NULL, {"memory.max", "memory.high"}, "memory.current", "inactive_file "},
    {"cgroup", "memory", {"memory.limit_in_bytes", NULL}, "memory.usage_in_bytes", "total_inactive_file "},
};

// Whether `word` is one of a list separated by commas.
static bool names(const char *list, const char *word) {
  const size_t n = strlen(word);
  while (list) {
    if (strncmp(list, word, n) == 0 && (list[n] == ',' || list[n] == '\0')) return true;
    list = strchr(list, ',');
    if (list) list++;
  }
  return false;
}

// The path of this process's group, from /proc/self/cgroup: "ID:CONTROLLERS:PATH".
static bool find_group(const char *root, const group_version *version, char *path) {
  FILE *file = open_at(root, "proc/self/cgroup");
  if (!file) return false;
  char line[PATH_BYTES];
  bool found = false;
  while (!found && fgets(line, sizeof line, file)) {
    line[strcspn(line, "\n")] = '\0';
    char *controllers = strchr(line, ':');
    char *group = controllers ? strchr(controllers + 1, ':') : NULL;
    if (!group) continue;
    *group = '\0';
    controllers++;
    found = version->controller ? names(controllers, version->controller) : *controllers == '\0';
    if (found) memmove(path, group + 1, strlen(group + 1) + 1);
  }
  fclose(file);
  return found;
}

// mountinfo writes blanks and backslashes as three octal digits.
static void unescape(char *text) {
  char *to = text;
  for (const char *from = text; *from; to++) {
    unsigned code;
    if (*from == '\\' && sscanf(from + 1, "%3o", &code) == 1) {
      *to = (char)code;
      from += 4;
    } else {
      *to = *from++;
    }
  }
  *to = '\0';
}

// "ID PARENT MAJOR:MINOR ROOT POINT OPTIONS [TAG ...] - TYPE SOURCE SUPER_OPTIONS"
static bool parse_mount(char *line, const group_version *version, char *mount_root, char *point) {
  char *type = strstr(line, " - ");
  char file_system[32], options[1024] = "";
  if (!type || sscanf(type + 3, "%31s %*s %1023s", file_system, options) < 1) return false;
  if (strcmp(file_system, version->file_system) != 0) return false;
  if (version->controller && !names(options, version->controller)) return false;
  if (sscanf(line, "%*s %*s %*s %4095s %4095s", mount_root, point) != 2) return false;
  unescape(mount_root);
  unescape(point);
  return true;
}

// Where the version's tree is mounted, and which group of it is there.
static bool find_mount(const char *root, const group_version *version, char *mount_root, char *point) {
  FILE *file = open_at(root, "proc/self/mountinfo");
  if (!file) return false;
  char *line = NULL;
  size_t room = 0;
  bool found = false;
  while (!found && getline(&line, &room, file) > 0) found = parse_mount(line, version, mount_root, point);
  free(line);
  fclose(file);
  return found;
}

// What the group in `folder` has left; UINT64_MAX when it sets no limit, or is not there.
static uint64_t group_left(const char *folder, const group_version *version) {
  uint64_t limit = UINT64_MAX, number, used, reclaimable = 0;
  for (size_t i = 0; i < 2; i++) {
    if (version->limits[i] && read_number(folder, version->limits[i], &number)) limit = smaller(limit, number);
  }
  if (limit >= INT64_MAX / 2 || !read_number(folder, version->usage, &used)) return UINT64_MAX;
  (void)read_field(folder, "memory.stat", version->reclaimable, &reclaimable);
  used -= smaller(used, reclaimable);
  return limit - smaller(limit, used);
}

// The least of the process's group and all above it, up to the mount.
static uint64_t tree_left(const char *root, const group_version *version) {
  char group[PATH_BYTES], mount_root[PATH_BYTES], point[PATH_BYTES], folder[2 * PATH_BYTES];
  if (!find_group(root, version, group) || !find_mount(root, version, mount_root, point)) return UINT64_MAX;
  // Inside a container the mount can begin at a group below the top; a group elsewhere cannot be seen from here.
  const size_t prefix = strcmp(mount_root, "/") == 0 ? 0 : strlen(mount_root);
  const bool below = strncmp(group, mount_root, prefix) == 0 && (group[prefix] == '/' || group[prefix] == '\0');
  const char *rest = below && !strstr(group, "/..") ? group + prefix : "";
  const int base = snprintf(folder, sizeof folder, "%s%s", root, point);
  const int length = snprintf(folder, sizeof folder, "%s%s%s", root, point, rest);
  if (base < 0 || length < 0 || (size_t)length >= sizeof folder) return UINT64_MAX;
  uint64_t least = group_left(folder, version);
  for (size_t n = (size_t)length; n > (size_t)base;) {
    while (n > (size_t)base && folder[n - 1] != '/') n--;
    while (n > (size_t)base && folder[n - 1] == '/') n--;
    folder[n] = '\0';
    least = smaller(least, group_left(folder, version));
  }
  return least;
}

// ---------------------------------------------------------------------------------------------------------------------
// All limits

static void limit_by(clb_available *a, uint64_t bytes, const char *limit) {
  if (bytes < a->bytes) *a = (clb_available){bytes, limit};
}

static void limit_by_resource(clb_available *a, const char *root, bool data, uint64_t stack_bytes) {
  struct rlimit limit;
  uint64_t used_kib = 0;
  if (getrlimit(data ? RLIMIT_DATA : RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return;
  (void)read_field(root, "proc/self/status", data ? "VmData:" : "VmSize:", &used_kib);
  const uint64_t used = used_kib * 1024 + stack_bytes;
  limit_by(a, limit.rlim_cur - smaller(limit.rlim_cur, used), data ? "RLIMIT_DATA" : "RLIMIT_AS");
}

clb_available clb_available_memory(const char *root, uint64_t stack_bytes) {
  clb_available a = {CLB_UNKNOWN_BYTES, ""};
  uint64_t kib;
  if (read_field(root, "proc/meminfo", "MemAvailable:", &kib)) limit_by(&a, kib * 1024, "free memory");
  for (size_t i = 0; i < sizeof kVersions / sizeof *kVersions; i++) {
    limit_by(&a, tree_left(root, &kVersions[i]), "control group");
  }
  limit_by_resource(&a, root, false, stack_bytes);
  limit_by_resource(&a, root, true, stack_bytes);
  return a;
}

// ---------------------------------------------------------------------------------------------------------------------
// Sharing out

static uint64_t reserve_of(uint64_t available) {
  return smaller(larger(available / 16, (uint64_t)64 << 20), (uint64_t)1 << 30);
}

clb_budget clb_split_budget(const clb_budget_request *r) {
  clb_budget b = {0};
  const uint64_t cache_asked = smaller(r->cache, r->all_experts);
  b.minimum = r->fixed + (cache_asked ? cache_asked : r->min_cache);
  if (r->budget) {
    b.budget = r->budget;
    b.fits = b.budget >= b.minimum;
  } else if (r->available != CLB_UNKNOWN_BYTES) {
    const uint64_t reserve = smaller(reserve_of(r->available), r->available);
    b.budget = larger(r->available - reserve, smaller(b.minimum, r->available));
    b.reserve = r->available - b.budget;
    b.fits = cache_asked || b.budget >= b.minimum;
  } else {
    b.budget = larger(b.minimum, r->fixed + r->all_experts);
    b.fits = true;
  }
  const uint64_t left = b.budget > r->fixed ? b.budget - r->fixed : 0;
  b.cache = cache_asked ? cache_asked : larger(smaller(left, r->all_experts), r->min_cache);
  return b;
}
