"""The C++ source of the fast CPU path: a string, which is packaged like any module and is part of the cache's key.

The bits of a float without its sign, read as an integer, rise with its magnitude. So every count, amax and amin are
integer comparisons; only the sum of squares converts, to float64, where no square of a float32 overflows. Data is read
in blocks that stay in the first-level cache. One pass over a block takes its extrema and its sum of squares as if all
were finite. Only a block with zeros or subnormals is read again to count them, and only one with infinities or NaNs to
count these and to sum without them; the next block after such a one is not summed at first.

Vector types are those of GCC and Clang; intrinsics are used only where GCC 12 splits a conversion.
"""

SOURCE = r"""
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512BW__) && defined(__AVX512DQ__)
constexpr int vector_bytes = 64;
#elif defined(__AVX2__)
constexpr int vector_bytes = 32;
#else
constexpr int vector_bytes = 16;
#endif
constexpr int wide = vector_bytes / 8;
constexpr int block_bytes = 8192;  // no 16-bit counter of a lane can overflow in it
constexpr double infinity = std::numeric_limits<double>::infinity();

template <class T, int n> struct Pack { typedef T type __attribute__((vector_size(n * sizeof(T)))); };
typedef Pack<double, wide>::type Doubles;
typedef Pack<float, wide>::type Floats;
typedef Pack<int64_t, wide>::type Longs;
typedef Pack<int32_t, wide>::type Ints;
typedef Pack<int16_t, wide>::type Shorts;

template <class V> inline V load(const void* p) { V v; std::memcpy(&v, p, sizeof v); return v; }

// torch.set_flush_denormal must not hide subnormals.
struct DefaultFloatEnvironment {
    std::fenv_t saved;
    DefaultFloatEnvironment() { std::fegetenv(&saved); std::fesetenv(FE_DFL_ENV); }
    ~DefaultFloatEnvironment() { std::fesetenv(&saved); }
};

inline Doubles widen(Floats x) {
#if defined(__AVX512DQ__) && defined(__AVX512BW__)
    return (Doubles)_mm512_cvtps_pd((__m256)x);
#else
    return __builtin_convertvector(x, Doubles);
#endif
}

// Each format: its word, the code of infinity, the mantissa's width; `squares` adds those of `vector_bytes` to sums.
struct Float64 {
    using Word = int64_t;
    static constexpr Word inf = 0x7ff0000000000000;
    static constexpr int mantissa = 52;
    static inline void squares(const Word* p, Doubles* sums) {
        const Doubles x = load<Doubles>(p);
        sums[0] += x * x;
    }
};

inline void square(Floats f, Doubles& sum) {
    const Doubles x = widen(f);
    sum += x * x;
}

struct Float32 {
    using Word = int32_t;
    static constexpr Word inf = 0x7f800000;
    static constexpr int mantissa = 23;
    static inline void squares(const Word* p, Doubles* sums) {
        for (int i = 0; i < 2; ++i) square(load<Floats>(p + i * wide), sums[i]);
    }
};

struct BFloat16 {
    using Word = int16_t;
    static constexpr Word inf = 0x7f80;
    static constexpr int mantissa = 7;
    static inline void squares(const Word* p, Doubles* sums) {
        for (int i = 0; i < 2; ++i) {
            const Ints pair = load<Ints>(p + 2 * i * wide);  // two elements: each is the upper half of a float32
            square((Floats)(pair & -0x10000), sums[2 * i]);
            square((Floats)(pair << 16), sums[2 * i + 1]);
        }
    }
};

struct Float16 {
    using Word = int16_t;
    static constexpr Word inf = 0x7c00;
    static constexpr int mantissa = 10;
    static inline void squares(const Word* p, Doubles* sums) {
        for (int i = 0; i < 4; ++i) square(convert(load<Shorts>(p + i * wide)), sums[i]);
    }
    static inline Floats convert(Shorts h) {
#if defined(__AVX512DQ__) && defined(__AVX512BW__)
        return (Floats)_mm256_cvtph_ps((__m128i)h);
#elif defined(__AVX2__) && defined(__F16C__)
        return (Floats)_mm_cvtph_ps(_mm_loadl_epi64((const __m128i*)&h));
#else
        // Rebias the exponent; a subnormal gets one unit more and loses the implicit bit that it never had.
        Ints m = __builtin_convertvector(h & 0x7fff, Ints), small = m < 0x400;
        Floats normal = (Floats)((m << 13) + (112 << 23));
        Floats subnormal = (Floats)((m << 13) + (113 << 23)) - 0x1p-14f;
        return (Floats)(((Ints)subnormal & small) | ((Ints)normal & ~small));
#endif
    }
};

// The value of a code, at most that of infinity.
template <class F> double value_of(int64_t code) {
    constexpr int bias = int(F::inf >> F::mantissa) >> 1;
    if (code >= F::inf) return infinity;
    const int64_t field = code >> F::mantissa, implicit = field ? int64_t(1) << F::mantissa : 0;
    const int64_t fraction = (code & ((int64_t(1) << F::mantissa) - 1)) | implicit;
    return std::ldexp(double(fraction), int(field ? field : 1) - bias - F::mantissa);
}

template <class F> struct Statistics {
    using Word = typename F::Word;
    using Natural = typename std::make_unsigned<Word>::type;
    static constexpr Word top = std::numeric_limits<Word>::max();
    static constexpr int lanes = vector_bytes / sizeof(Word), block = block_bytes / sizeof(Word), sums = 4;
    typedef typename Pack<Word, lanes>::type V;
    typedef typename Pack<Natural, lanes>::type U;

    const Word normal;  // the code of the smallest normal value
    int64_t zeros = 0, small = 0, infs = 0, nans = 0;  // small: zeros and subnormals
    V most{};          // the largest finite code
    U least = U{} - 1;  // the smallest code but zero, less one: zero, wrapped, is the largest
    Doubles squares[sums] = {};
    bool finite = true;  // whether the last block was; then the next is expected to be

    explicit Statistics(int64_t limit) : normal(Word(limit)) {}

    static bool any(const V& test) {
        Longs words;
        std::memcpy(&words, &test, sizeof words);
        int64_t found = 0;
        for (int i = 0; i < wide; ++i) found |= words[i];
        return found != 0;
    }

    static int64_t total(const V& v) {
        int64_t sum = 0;
        for (int i = 0; i < lanes; ++i) sum += v[i];
        return sum;
    }

    void add(const Word* p, int length) {  // length is a multiple of lanes
        V high{}, low = V{} + top;
        Doubles sum[sums] = {};
        const bool expected = finite;
        for (int i = 0; i < length; i += lanes) {
            const V m = load<V>(p + i) & top;
            high = m > high ? m : high;
            low = m < low ? m : low;
            if (expected) F::squares(p + i, sum);
        }
        if (any(low < normal)) {
            add_small(p, length);
        } else {
            const U less = (U)low - 1;
            least = less < least ? less : least;
        }
        finite = !any(high >= F::inf);
        if (expected && finite) {
            most = high > most ? high : most;
            for (int j = 0; j < sums; ++j) squares[j] += sum[j];
        } else {
            add_finite(p, length);
        }
    }

    void add_small(const Word* p, int length) {
        U low = least;
        V zero{}, below{};
        for (int i = 0; i < length; i += lanes) {
            const V m = load<V>(p + i) & top;
            const U less = (U)m - 1;
            low = less < low ? less : low;
            zero += m == 0;  // a true lane is -1
            below += m < normal;
        }
        least = low;
        zeros -= total(zero);
        small -= total(below);
    }

    void add_finite(const Word* p, int length) {
        V high = most, inf{}, nan{};
        for (int i = 0; i < length; i += lanes) {
            const V m = load<V>(p + i) & top, finite = m & (m < F::inf);
            high = finite > high ? finite : high;
            inf += m == F::inf;
            nan += m > F::inf;
            Word kept[lanes];
            std::memcpy(kept, &finite, sizeof finite);
            F::squares(kept, squares);
        }
        most = high;
        infs -= total(inf);
        nans -= total(nan);
    }

    void add_all(const Word* p, int64_t n) {
        const int64_t whole = n - n % lanes;
        for (int64_t start = 0; start < whole; start += block) {
            add(p + start, int(whole - start < block ? whole - start : block));
        }
        if (n > whole) {
            Word padded[lanes] = {};
            std::memcpy(padded, p + whole, size_t(n - whole) * sizeof(Word));
            add(padded, lanes);
            zeros -= lanes - (n - whole);
            small -= lanes - (n - whole);
        }
    }

    void write(int64_t n, double* out) const {
        Word amax = 0;
        Natural amin = Natural(-1);
        for (int i = 0; i < lanes; ++i) {
            amax = most[i] > amax ? most[i] : amax;
            amin = least[i] < amin ? least[i] : amin;
        }
        out[0] = double(zeros);
        out[1] = double(small);
        out[2] = double(n - infs - nans);
        out[3] = double(n - nans);
        out[4] = value_of<F>(amax);
        out[5] = amin < Natural(F::inf) ? value_of<F>(int64_t(amin) + 1) : infinity;
        out[6] = 0;
        for (int j = 0; j < sums; ++j) {
            for (int i = 0; i < wide; ++i) out[6] += squares[j][i];
        }
    }
};

// Bin j holds the magnitudes from 2**j times the smallest subnormal up to twice that.
template <class F> void histogram(const typename F::Word* p, int64_t n, double* bins) {
    using Word = typename F::Word;
    constexpr int fields = int(F::inf >> F::mantissa) + 1;
    constexpr int tables = 4;  // equal neighbours do not wait for each other's store
    int64_t counts[tables][fields] = {};
    int64_t subnormal[F::mantissa] = {};
    const auto count = [&](int64_t i, int table) {
        const Word m = p[i] & std::numeric_limits<Word>::max();
        ++counts[table][m >> F::mantissa];
        if (m >> F::mantissa == 0 && m) ++subnormal[63 - __builtin_clzll((unsigned long long)m)];
    };
    int64_t i = 0;
    for (; i + tables <= n; i += tables) {
        for (int table = 0; table < tables; ++table) count(i + table, table);
    }
    for (; i < n; ++i) count(i, 0);
    for (int j = 0; j < F::mantissa; ++j) bins[j] = double(subnormal[j]);
    for (int e = 1; e < fields - 1; ++e) {
        int64_t sum = 0;
        for (int table = 0; table < tables; ++table) sum += counts[table][e];
        bins[F::mantissa + e - 1] = double(sum);
    }
}

template <class F> void measure(const void* data, int64_t n, int64_t normal, int64_t with_histogram, double* out) {
    const auto* p = static_cast<const typename F::Word*>(data);
    DefaultFloatEnvironment guard;
    Statistics<F> statistics(normal);
    statistics.add_all(p, n);
    statistics.write(n, out);
    if (with_histogram) histogram<F>(p, n, out + 7);
}

}  // namespace

#define EXPORT(name, F)                                                                             \
    extern "C" void measure_##name(const void* x, int64_t n, int64_t limit, int64_t h, double* out) { \
        measure<F>(x, n, limit, h, out);                                                            \
    }
EXPORT(float64, Float64)
EXPORT(float32, Float32)
EXPORT(bfloat16, BFloat16)
EXPORT(float16, Float16)
"""
