// Brings weights from the caller's layout into panels (packed_matrix.h).
#pragma once
#include "arena.h"
#include "packed_matrix.h"

namespace tandem {

// An all-zero matrix of n outputs and k inputs. in_half: of products in half precision (half_panel.h).
PackedMatrix allocate_matrix(Arena& arena, NumberFormat format, int n, int k, bool in_half);

// Writes `rows` outputs of k inputs each from output `first_row` on, into every `panel_step`-th panel: blocks value for
// value into the same format or dequantised into F32 and BF16, plain or compressed; floats into any format but Q4_0
// (rounded). What a panel of BF16_COMPRESSED cannot hold is taken from `arena`. Throws std::invalid_argument for other
// pairs and for k that does not divide into blocks.
void pack_matrix(Arena& arena, PackedMatrix& matrix, int first_row, int panel_step, int rows, NumberFormat source, const void* data);

float float_of(NumberFormat source, const void* data, size_t index);

}  // namespace tandem
