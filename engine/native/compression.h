// Turns panels of BF16 into BF16_COMPRESSED (compressed_panel.h).
#pragma once
#include <vector>

#include "arena.h"
#include "compressed_panel.h"

namespace tandem {

// Compresses panels of one matrix. `finish` hands the exceptions of all of them over to the arena and must be called.
class PanelCompressor {
  public:
    // Throws std::invalid_argument for more inputs than an exception can address.
    PanelCompressor(Arena& arena, PackedMatrix& matrix);

    // `plain`: the panel as BF16, panel_bytes(kBf16, k_padded) long.
    void compress(int panel, const uint8_t* plain);
    void finish();

  private:
    void take_exceptions(int group, const uint8_t* plain, uint8_t* places);
    void keep_plain(CompressedHeader& header, const uint8_t* plain);

    Arena& arena_;
    PackedMatrix& matrix_;
    std::vector<HighByteException> exceptions_;
    std::vector<CompressedHeader*> with_exceptions_;  // in the order of their exceptions
};

}  // namespace tandem
