// CRC-32C (Castagnoli, as in iSCSI and ext4): reflected polynomial 0x82F63B78, initial and final value inverted.
#ifndef CLB_CRC32C_H
#define CLB_CRC32C_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// The CRC of n bytes at p, continued from crc: 0 to start, or the CRC of the bytes before.
// clb_crc32c(0, "123456789", 9) == 0xE3069283
uint32_t clb_crc32c(uint32_t crc, const void *p, size_t n);

// The same by tables alone: the reference, and what runs on CPUs without a CRC instruction.
uint32_t clb_crc32c_portable(uint32_t crc, const void *p, size_t n);

#ifdef __cplusplus
}
#endif

#endif
